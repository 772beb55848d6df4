"""How fast is one session, and how far from the latency model?

`python -m benchmarks.one_session` pins the verifier to one core and the draft worker to another; orchestrator, store
and client share the draft worker's core. It measures tokens per second plain, with sequential rounds and pipelined, in
arms that take turns, each beside the value of `outrider.gamma` from measured alpha, t_d, t_v and r; the same prompts in
one process, by `transformers` and by our models without a protocol; and what a round costs outside the model passes.

The round's own cost comes from toy models whose passes sleep for a known time: what is left of a round is protocol.
"""
