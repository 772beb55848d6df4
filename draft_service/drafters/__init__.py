"""Drafters behind one small protocol, one file each."""
