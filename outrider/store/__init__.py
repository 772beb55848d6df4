"""The session log, lease, registry and KV directory in Redis or Valkey."""
