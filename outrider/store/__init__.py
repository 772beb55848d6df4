"""The session store: log, lease, state and KV directory of every session, and the registry of workers.

`sessions.SessionStore` and `registry.Registry` speak to Redis or Valkey, standalone or cluster;
`embedded.EmbeddedServer` starts a real server when there is none.
"""
