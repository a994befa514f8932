"""Faults of compressed reductions."""
