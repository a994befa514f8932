"""Saves and loads that are timed, and what is counted beside them."""
