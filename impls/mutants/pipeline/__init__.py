"""Faults of pipelines."""
