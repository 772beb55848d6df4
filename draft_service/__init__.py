"""The draft worker: guesses the next tokens of many sessions and streams them to verifiers."""
