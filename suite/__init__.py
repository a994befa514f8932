"""The judge: does splitting the work over many ranks change nothing but the cost?"""

from __future__ import annotations

if __name__ != "shardproof":  # one name for one module: it would be loaded a second time
    raise ImportError("the package is called shardproof: write `import shardproof`")

# As of typing, whose import takes longer than all that comes before Ctrl-C is heard.
TYPE_CHECKING = False

#: Results of different versions are not compared.
VERSION = "0.1.0"
__version__ = VERSION

if TYPE_CHECKING:
    from typing import Any

    from shardproof.commands.prove import prove
    from shardproof.workloads.own import OwnWorkload

__all__ = ["OwnWorkload", "VERSION", "__version__", "prove"]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: ranks import this package without pandas."""
    if name == "prove":
        from shardproof.commands.prove import prove

        return prove
    if name == "OwnWorkload":
        from shardproof.workloads.own import OwnWorkload

        return OwnWorkload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
