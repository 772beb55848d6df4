"""Trains drafts for a target, on text the target wrote itself."""
