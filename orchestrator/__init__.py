"""The orchestrator: owns the session, the commit and what the client sees."""
