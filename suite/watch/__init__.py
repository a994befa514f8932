"""A training script under observation: replicas, collectives, finite values, memory, ranks.

``import shardproof.watch`` in a rank that a launcher has started (``RANK`` and ``WORLD_SIZE`` are
set) watches that rank from then on; in any other process it does nothing.  Ranks that ``shardproof
watch train.py`` starts are watched without that line.  What is watched, and what cannot be seen:
docs/watch.md.

The path of a run: ``launch`` starts the ranks; in each ``rank`` hooks steps and groups, ``compare``
sends checksums over ``exchange``; ``judge`` reads what they left, ``report`` shows it.
"""

from __future__ import annotations

import os

from shardproof import wings

if not wings.is_loading and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    from shardproof.watch.rank import watch_this_rank

    watch_this_rank()
