"""A long run at full load: nothing leaks, no text changes, nobody waits without bound.

A cluster of processes serves a fixed number of clients at once from a KV pool that is too small for them, so that
sessions give way all the time. What the clients ask is drawn at random: prompts and lengths, greedy, seeded and
unseeded texts, speculation off, automatic or fixed, one drafter or another, second turns; some leave in the middle
and come back or never do. Every greedy and seeded text is compared with its twin, the same request without drafts,
which was asked before, one at a time, of a verifier that takes no KV over from anybody.

`script.py` is what is asked, `stage.py` the clusters, `hearing.py` what a client hears, `seats.py` the clients,
`ledger.py` what they note, `watching.py` the processes' memory and gauges, `findings.py` what is wrong, `report.py` the
page.
"""
