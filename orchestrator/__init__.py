"""The orchestrator: places sessions, runs rounds, commits tokens and serves clients."""
