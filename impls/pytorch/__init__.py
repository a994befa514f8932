"""Adapters for PyTorch's own systems: they translate the contract and compensate for divisions."""
