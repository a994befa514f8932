"""Faults of ranks that train alone and meet at intervals."""
