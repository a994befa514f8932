"""Faults that have no effect on a few ranks: they need large worlds or large models.

``shardproof mutants`` plants none of them: they would survive in worlds that can run here.
``shardproof simulate --faults`` simulates each in the world that it names.
"""
