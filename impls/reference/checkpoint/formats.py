"""The formats by name."""

from __future__ import annotations

from shardproof.impls.reference.checkpoint.asynchronous import AsynchronousSharded
from shardproof.impls.reference.checkpoint.full import Full
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.checkpoint.sharded import Sharded

FORMATS: dict[str, type[Saver]] = {
    "full": Full,
    "sharded": Sharded,
    "asynchronous": AsynchronousSharded,
}
