"""Collectives over send and recv: one algorithm per file, as a schedule (schedule.py)."""
