"""Faults of the judge."""
