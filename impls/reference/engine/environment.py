"""The environment as a launcher would leave it, for the time of a call.

The suite starts no launcher and sets no variables; some upstream systems read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """``values`` in the environment where nothing stands; afterwards all is as before."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        changed = {name: value for name, value in before.items() if os.environ.get(name) != value}
        os.environ.update(changed)
