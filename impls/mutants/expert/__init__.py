"""Faults of expert parallelism."""
