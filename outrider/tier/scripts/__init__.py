"""The Lua scripts of the tier, one per change; all keys that one of them touches share a hash tag."""
