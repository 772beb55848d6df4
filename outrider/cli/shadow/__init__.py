"""`outrider shadow`: a candidate drafter on sessions that are over, before it touches a request.

`sources.py` finds the sessions, `child.py` runs the process that drafts, `summary.py` says what came of it.
"""
