"""`outrider top`: what a cluster does, live in a terminal."""
