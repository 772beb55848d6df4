"""The draft worker: guesses the next tokens."""
