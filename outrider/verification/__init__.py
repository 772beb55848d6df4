"""Acceptance rules: which draft tokens the target's law lets pass, and what replaces the rest."""
