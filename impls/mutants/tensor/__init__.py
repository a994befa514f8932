"""Faults of tensor parallelism."""
