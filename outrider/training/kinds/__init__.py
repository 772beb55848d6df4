"""What can be trained, one file a kind, behind one protocol."""
