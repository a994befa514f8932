"""The cases of a run once more, elsewhere or later: what of each comes out the same."""
