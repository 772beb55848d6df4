"""Measurements of speed and exactness, each run as a module."""
