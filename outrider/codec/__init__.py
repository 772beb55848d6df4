"""Protobuf <-> frozen values, both ways; the only place that trusts nothing from the wire.

`types`, `decode` and `propose` (of VerifyService), `draft`, `generation`, `catalogue`, `tokens`. `x_to_proto` never
fails on a value that keeps its own contract. `x_from_proto` returns a value that keeps it, or raises: `InvalidRequest`,
naming the field, for what clients send; `ProtocolError` for what peer services send.
"""
