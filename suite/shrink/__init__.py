"""A failing case, made as small as it can be while it still fails for the same cause."""
