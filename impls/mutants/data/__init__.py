"""Faults of data parallelism."""
