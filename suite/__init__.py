"""The judge: does splitting the work over many ranks change nothing but the cost?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from suite.version import VERSION as __version__

if TYPE_CHECKING:
    from suite.proving import prove

__all__ = ["__version__", "prove"]


def __getattr__(name: str) -> Any:
    """``prove`` is imported when it is asked for: ranks import this package without pandas."""
    if name == "prove":
        from suite.proving import prove

        return prove
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
