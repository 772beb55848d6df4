"""Model runners: one protocol, a `transformers` runner with a block KV pool, and an exact toy model."""
