"""Faults that a few ranks do not show: they begin in large worlds, or with large models.

``shardproof mutants`` plants none of them, for they would survive in worlds that can be run here.
``shardproof simulate --faults`` simulates each in the world that it names.
"""
