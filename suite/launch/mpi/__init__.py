"""Ranks whose places an ``mpirun`` gives: for one case, or kept for many."""
