"""One case from start to verdict: runner (parent), leader, rank program, verdict."""
