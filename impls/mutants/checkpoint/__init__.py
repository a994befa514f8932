"""Faults planted in how checkpoints are saved and loaded."""
