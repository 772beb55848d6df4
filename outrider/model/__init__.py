"""Models behind one runner protocol, and their KV blocks."""
