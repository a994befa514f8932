"""``torchrun ... -m shardproof.watch train.py``: every rank runs the script, watched."""

from __future__ import annotations

import sys

from shardproof.watch.script import main

if __name__ == "__main__":
    main(sys.argv[1:])
