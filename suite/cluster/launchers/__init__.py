"""Ranks that other launchers start: who they are, how they meet, and what they leave."""
