"""Faults that only large worlds show, planted and simulated: each must break a named promise.

``faults`` finds and judges them, ``command`` is ``shardproof simulate --faults``.
"""
