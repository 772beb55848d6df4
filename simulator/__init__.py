"""A cluster in simulated time: the real machines, policy and placement, with workers and wires that only take time.

`command` is the front door, `cluster` puts everything together; see `docs/decisions/simulated-time.md`.
"""
