"""The wing ``training``: names for Python (``Training``, ``wrap``, ``join``), and no command."""

from __future__ import annotations

from shardproof.wings import Wing

WING = Wing()
