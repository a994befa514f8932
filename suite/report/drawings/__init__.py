"""Drawings of the report as inline SVG, each with a name, a description and a table."""
