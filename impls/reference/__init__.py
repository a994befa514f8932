"""Reference strategies: short, correct and written like a textbook, one file per strategy."""
