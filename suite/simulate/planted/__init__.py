"""Faults that appear only in large worlds, simulated: each must break a named promise.

``faults`` finds and judges them, ``command`` is ``shardproof simulate --faults``.
"""
