"""Planted faults of context parallelism."""
