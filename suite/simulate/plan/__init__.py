"""``shardproof plan``: which mesh and strategy trains a model on a cluster, and fits its memory.

``candidates`` enumerates what ``plan.yaml`` combines, ``formulas`` prunes and ranks by closed
forms, ``folded`` simulates the best ones to the byte, ``search`` puts these together, ``tables``
and ``placement`` print, ``scenario`` writes what runs the best plan.
"""
