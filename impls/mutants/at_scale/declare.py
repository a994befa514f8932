"""How to declare a fault at scale: ``@fault_at_scale("name", says=..., mesh=...)`` on a class.

The docstring of the class describes the fault.  The class inherits from its parent, or from a part
of the parent.  In a small world it must equal its parent, bit for bit and byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardproof.contract import Implementation
from shardproof.impls.mutants.declare import planted

#: Fields of ``costs.shapes.Shape``: a small model in the form of Llama.
SHAPE: Mapping[str, Any] = {
    "layers": 2, "hidden": 1024, "heads": 16, "vocab": 8192, "seq": 32, "mlp": "swiglu",
    "norm": "rms",
}  # fmt: skip
#: The same of a model in which no fault shows.
SMALL: Mapping[str, Any] = {"hidden": 64, "heads": 4, "vocab": 128, "seq": 16}


@dataclass(frozen=True)
class FaultAtScale:
    """One planted fault, the world that shows it, and one that does not.

    ``says``: a regular expression; a sentence about a broken promise must match it.  ``shape``:
    fields of the model's shape that differ from :data:`SHAPE`.  ``small``: the mesh that shows
    nothing (empty: two ranks along each axis), with a shape as ``small_shape`` and as many
    ``small_micro_batches``.  ``accounting``: precision and optimizer, by its id.
    """

    name: str
    parent: str
    summary: str
    says: str
    mesh: Mapping[str, int]
    shape: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    accounting: str = "A32"
    small: Mapping[str, int] = field(default_factory=dict)
    small_shape: Mapping[str, Any] = field(default_factory=dict)
    small_micro_batches: int = 2

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields of the model that shows the fault."""
        return {**SHAPE, **self.shape}

    @property
    def small_fields(self) -> Mapping[str, Any]:
        """Fields of the model that does not show the fault."""
        return {**SHAPE, **SMALL, **self.small_shape}


class Declare(Protocol):
    """The type of the decorator ``fault_at_scale`` of one parent."""

    def __call__(self, name: str, **fields: Any) -> Callable[[type], Any]: ...


def family(parent: type[Implementation], **usual: Any) -> Declare:
    """The decorator for faults of ``parent``; ``usual``: default fields of :class:`FaultAtScale`.

    It replaces the decorated class by the implementation that is made of it.  The attribute
    ``at_scale`` of that holds the declaration.
    """

    def fault_at_scale(name: str, **fields: Any) -> Any:
        def declare(cls: type) -> type[Implementation]:
            made: type[Implementation] = planted(cls, parent)
            summary = " ".join(str(cls.__doc__).split()).removesuffix(".")
            home = parent.__module__.rpartition("impls.")[2].replace(".", "/")
            made.at_scale = FaultAtScale(name, home, summary, **(usual | fields))  # type: ignore[attr-defined]
            return made

        return declare

    return fault_at_scale
