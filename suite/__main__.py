"""``python -m shardproof``, and the command ``shardproof``."""

from __future__ import annotations

from shardproof.commands.main import main

if __name__ == "__main__":
    main()
