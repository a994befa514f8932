"""Times as inline SVG: ratios, efficiencies and bandwidths."""
