"""Adapters around what PyTorch ships: they translate, and compensate where a system divides."""
