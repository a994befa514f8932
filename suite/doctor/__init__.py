"""Traps of this machine, found before they cost a run."""
