"""The differences between runs, and whether a change may pass."""
