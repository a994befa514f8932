"""Collectives over send and recv: one algorithm a file, written as a schedule (schedule.py)."""
