"""The commands that people type, and the ways in from Python and pytest."""
