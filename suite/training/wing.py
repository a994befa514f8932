"""What ``training`` adds to the suite: two names for Python, and no command."""

from __future__ import annotations

from shardproof.wings import Wing

WING = Wing()
