"""Which triggers meet which features in the cases: a fault can hide only where a pair has none."""
