"""Ranks on machines of their own: torchrun, records from elsewhere, containers."""
