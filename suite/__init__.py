"""The judge: when work is split over many ranks, does anything other than the cost change?"""

from __future__ import annotations

if __name__ != "shardproof":  # one name for one module: it would be loaded a second time
    raise ImportError(f"this package cannot be imported as {__name__!r}: write `import shardproof`")

# As of typing, whose import takes longer than all that comes before Ctrl-C is heard.
TYPE_CHECKING = False

#: Results of different versions are not compared.
VERSION = "0.1.0"
__version__ = VERSION

if TYPE_CHECKING:
    from typing import Any

    from shardproof.commands.prove import prove
    from shardproof.training.builder import Training
    from shardproof.training.loops import wrap
    from shardproof.training.world import join
    from shardproof.workloads.own import OwnWorkload

__all__ = ["OwnWorkload", "Training", "VERSION", "__version__", "join", "prove", "wrap"]

#: Name -> module that has it: ranks import this package without pandas.
_LAZY = {
    "prove": "shardproof.commands.prove",
    "OwnWorkload": "shardproof.workloads.own",
    "Training": "shardproof.training.builder",
    "wrap": "shardproof.training.loops",
    "join": "shardproof.training.world",
    "ColumnParallelLinear": "shardproof.impls.reference.tensor.linear",
    "RowParallelLinear": "shardproof.impls.reference.tensor.linear",
    "ParallelSelfAttention": "shardproof.impls.reference.tensor.linear",
    "VocabularyParallelEmbedding": "shardproof.impls.reference.tensor.linear",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
