"""Faults of several axes at once."""
