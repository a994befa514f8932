"""Explanations of cases, checks and verdicts, for a person at a terminal."""
