"""``torchrun ... -m shardproof.watch train.py``: every rank runs the script, watched.

Each rank watches its own process, then runs the script as ``python train.py`` does.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from shardproof.verdicts import BAD_INPUT


def main(words: Sequence[str]) -> None:
    """Run the script ``words[0]`` as ``__main__``, with the other words as its arguments."""
    if not words or not {"RANK", "WORLD_SIZE"} <= {*os.environ}:
        problem = "RANK and WORLD_SIZE are not set; torchrun sets them" if words else "no script"
        remedy = "torchrun ... -m shardproof.watch train.py, or: shardproof watch train.py"
        sys.stderr.write(f"{problem} - {remedy}\n")
        sys.exit(BAD_INPUT)
    from shardproof.watch import rank

    watch = rank.activate()
    watch.run_as(words)
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if why := _refusal(error):
            watch.note_refusal(why)
        raise


def _refusal(error: SystemExit) -> str:
    """The message of ``argparse`` before it ended the program; ``""``: something else did."""
    frame = error.__traceback__
    while frame is not None:
        code, values = frame.tb_frame.f_code, frame.tb_frame.f_locals
        if code.co_filename == argparse.__file__ and code.co_name == "error":
            return str(values.get("message", "unknown arguments"))
        frame = frame.tb_next
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
