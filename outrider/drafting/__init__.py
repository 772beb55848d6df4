"""Networks that draft from what the target already computed, and their checkpoints."""
