"""Checks of workloads that train nothing: each is the only one of its cases, but for ``faults``."""
