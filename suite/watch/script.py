"""The program of a watched rank: watch this process, then run the script as ``python train.py``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(words: Sequence[str]) -> None:
    """Run the script ``words[0]`` as ``__main__``, with the other words as its arguments."""
    if not words:
        sys.exit("usage: torchrun ... -m shardproof.watch train.py [ARGUMENTS]")
    from shardproof.watch import rank

    rank.activate()
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")
