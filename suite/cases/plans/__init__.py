"""Plans of a case beside its training: relations to another run, and checkpoints.

Each is an object with hooks for before and after the first run; ``all_plans.py`` lists them.
``saving.py`` and ``membership.py`` are what ranks do by a plan, within a run.
"""
