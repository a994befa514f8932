"""Faults around upstream systems."""
