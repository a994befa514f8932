"""Faults planted one at a time, which the judge must catch.

A mutant is a clean implementation with one overridden method or at most ten changed lines.  Rows of
the fault collection are cited by their ids (D01, O02, ...).
"""
