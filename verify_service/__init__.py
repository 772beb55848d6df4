"""The verifier: tests proposals against the target model and decides what is committed."""
