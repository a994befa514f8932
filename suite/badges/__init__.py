"""Badges: a run's verdicts as SVG, one for each strategy, backend and capability."""
