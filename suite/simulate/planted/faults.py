"""The faults of ``impls/mutants/at_scale``: found, simulated next to their parents, and judged.

A fault is killed if one of its ranks breaks a promise, with the sentence that the fault names, and
the same ranks of its parent break none.  Both train the same model on the same mesh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardproof import registry
from shardproof.by_path import import_module
from shardproof.costs.shapes import BatchSize, MixtureShape, Shape
from shardproof.simulate import asked
from shardproof.simulate.figures import looked_at
from shardproof.simulate.promised import broken
from shardproof.simulate.rank import simulate
from shardproof.simulate.sources import ShapeSource

#: Where they are declared, below ``impls``.
FOLDER = "mutants/at_scale"
Verdict = Literal["killed", "survives", "killed otherwise", "parent broken"]


@dataclass(frozen=True)
class Planted:
    """A fault: the fields of its decorator (``mutants/at_scale/declare.py``), and the path of its
    class.
    """

    declared: Any
    path: str

    def source(self, implementation: str, small: bool = False) -> ShapeSource:
        """The training by ``implementation`` that shows the fault, or (``small``) does not show it.

        :raises SelectionError: the implementation does not take it.
        """
        fault = self.declared
        mesh, fields, micros = fault.mesh, fault.fields, fault.micro_batches
        if small:
            mesh = fault.small or dict.fromkeys(mesh, 2)
            fields, micros = fault.small_fields, fault.small_micro_batches
        mixture = {"mixture": MixtureShape(**fields["mixture"])} if "mixture" in fields else {}
        shape = Shape(fault.name, **{**fields, **mixture})
        made = asked.source(shape, implementation, mesh, fault.accounting, fault.options)
        assert isinstance(made, ShapeSource)
        return replace(made, work=BatchSize(1, shape.seq, micros))


@dataclass(frozen=True)
class Kill:
    """The judgement of a fault; ``sentence``: the broken promise that matches it, or else the first
    that a rank of it, or of its parent, breaks.
    """

    planted: Planted
    verdict: Verdict
    sentence: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether the fault is killed by the sentence that it names."""
        return self.verdict == "killed"


def faults() -> list[Planted]:
    """All faults, by file and in order of declaration."""
    return [*_found()]


def _found() -> Iterator[Planted]:
    for name in registry.modules(FOLDER):
        for attribute, value in vars(import_module(name)).items():
            declared = vars(value).get("at_scale") if isinstance(value, type) else None
            if declared is not None:
                yield Planted(declared, f"{name}:{attribute}")


class Judge:
    """Judges faults; parents that train the same are simulated once."""

    def __init__(self) -> None:
        self._parents: dict[str, list[str]] = {}

    def judge(self, planted: Planted) -> Kill:
        """Simulate ``planted`` and its parent."""
        fault = planted.declared
        if wrong := self._of_parent(planted):
            return Kill(planted, "parent broken", wrong[0])
        found = sentences(planted.source(planted.path), fault.accounting)
        if not found:
            return Kill(planted, "survives")
        named = (text for text in found if re.search(fault.says, text))
        if (sentence := next(named, "")) == "":
            return Kill(planted, "killed otherwise", found[0])
        return Kill(planted, "killed", sentence)

    def _of_parent(self, planted: Planted) -> list[str]:
        source = planted.source(planted.declared.parent)
        # Faults of one parent differ in name only, as their shapes do.
        key = repr(replace(source, shape=replace(source.shape, name="")))
        if key not in self._parents:
            self._parents[key] = sentences(source, planted.declared.accounting)
        return self._parents[key]


def sentences(source: ShapeSource, accounting: str) -> list[str]:
    """A sentence for each promise that ranks at the ends of each axis break, or for an error."""
    try:
        made = simulate(source, looked_at(source.axes))
        return broken(source, made, accounting)
    except Exception as error:  # noqa: BLE001 - a fault may end in any way
        return [f"simulation failed: {type(error).__name__}: {error}"]
