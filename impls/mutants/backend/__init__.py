"""Faults of a backend: a faulty process group around a sound one."""
