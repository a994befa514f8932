"""What differs between runs, and whether a change may pass."""
