"""What shardproof must know of the library, which is imported in processes of ranks only."""

from __future__ import annotations

from typing import ClassVar

from shardproof.backends import Takes, TorchBackend

REAL = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


class Acme(TorchBackend):
    """Ranks are processes, and their tensors lie on CPUs."""

    name = "acme"
    packages = ("acme_collectives",)
    #: Its gather knows no complex numbers, so no such call is made.
    takes: ClassVar[Takes] = {"gather": {"dtype": REAL}}

    def load(self) -> None:
        """Register it with torch."""
        import acme_collectives  # noqa: F401


class AcmeShort(Acme):
    """The same library with a fault."""

    name = "acme_short"
