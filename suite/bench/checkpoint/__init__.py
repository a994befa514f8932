"""Saves and loads that are timed, and the bytes counted with them."""
