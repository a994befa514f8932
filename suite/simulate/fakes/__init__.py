"""Tensors without values: known integers, remembered results, and torch where it reads values."""
