"""Checkpoints as files: what is in one, is it whole, how do two differ, another format."""
