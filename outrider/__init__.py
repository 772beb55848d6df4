"""Outrider: exact, pipelined, distributed speculative decoding; what its services share."""
