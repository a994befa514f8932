"""The first difference between a failing case and its oracle, at a line of the implementation."""
