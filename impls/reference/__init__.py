"""Reference strategies: short, textbook-shaped, correct.  One file a strategy."""
