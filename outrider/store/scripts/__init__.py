"""The Lua scripts of the store, one per change; each is sent with `prelude.lua` in front of it."""
