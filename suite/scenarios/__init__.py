"""Scenario files: schema, reading, expansion into cases, selection."""
