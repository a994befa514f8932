"""The wing ``training``: names for Python (``Training``, ``wrap``, ``join``), and no command."""

from __future__ import annotations

from shardproof.wings import Wing


class TrainingWing(Wing):
    """No command: only a line of help."""

    examples = ("from shardproof import Training, wrap, join      train: docs/tutorial-train.md",)


WING = TrainingWing()
