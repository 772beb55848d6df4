"""KV blocks outside the process: full blocks of 64 tokens in a Redis or Valkey server, under the keys of their content.

A session that moves to another verifier loads its KV instead of computing it again. The tier is a cache behind a cache:
whatever goes wrong here costs time at most, never a session and never a bit.
"""
