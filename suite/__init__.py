"""The judge: does splitting the work over many ranks change nothing but the cost?"""

from suite.version import VERSION as __version__

__all__ = ["__version__"]
