"""Wings: products around the core, each in a folder that can be removed.

A wing is a package of ``suite/`` with a module ``wing.py``, which defines ``WING``, an instance of
a subclass of :class:`Wing`.  A wing imports the core; the core reaches a wing only through
:func:`wings`, so it also runs in a tree without that folder: then ``shardproof --help`` lacks the
wing's commands.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

_SUITE = Path(__file__).parent

#: Whether :func:`wings` imports the wings now.  A package whose import has an effect in a script
#: (``shardproof.watch``) must not have it then.
is_loading = False


class Wing:
    """What a wing adds to the core; each method adds nothing by default.

    ``wing.py`` is imported with the command line, so its methods import
    the rest of the wing.
    """

    #: Lines of ``shardproof --help``: a command and what it does.
    examples: tuple[str, ...] = ()

    def add_commands(self, app: typer.Typer) -> None:
        """Add the commands of this wing to ``app``."""


def names() -> tuple[str, ...]:
    """Folders of the wings in this tree, sorted; no wing is imported."""
    return tuple(sorted(path.parent.name for path in _SUITE.glob("*/wing.py")))


@cache
def wings() -> tuple[Wing, ...]:
    """The wings in this tree, in the order of their folders' names."""
    global is_loading
    is_loading = True
    try:
        return tuple(importlib.import_module(f"shardproof.{name}.wing").WING for name in names())
    finally:
        is_loading = False
