"""The verifier: owns whether a token is accepted."""
