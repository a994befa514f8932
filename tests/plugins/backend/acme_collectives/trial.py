"""What shardproof must know of the library.  Nothing here imports it before a rank needs it."""

from __future__ import annotations

from shardproof.backends import TorchBackend


class Acme(TorchBackend):
    """Ranks are processes, and their tensors lie on CPUs."""

    name = "acme"
    packages = ("acme_collectives",)
    #: Its gather knows no complex numbers: such calls are not made.
    takes = {
        "gather": {
            "dtype": ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
        }
    }

    def load(self) -> None:
        """Register it with torch, in the process of a rank."""
        import acme_collectives  # noqa: F401


class AcmeShort(Acme):
    """The same library with a fault."""

    name = "acme_short"
