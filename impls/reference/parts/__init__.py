"""Pieces that several reference strategies share; none of them is a strategy by itself."""
