"""Measurements of the suite itself, run once and committed as evidence."""
