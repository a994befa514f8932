"""Faults of nodes in the cases of a run: ``cluster run --fault PLAN``; where there are no nodes.

A plan is a kind and words: ``kill_node,node=1,case=2,step=1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError, with_config

from shardproof.backends import BACKENDS
from shardproof.case import OF_CLUSTERS, OF_NODES, Case, Fault
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.launch.nodes import without_node_faults

#: Kinds of ``--fault``: those of a rank that need no expectation, of nodes, of the whole cluster.
KINDS = ("kill", *OF_NODES, *OF_CLUSTERS)
#: Phases that every trained case has in every step.
Phase = Literal["forward", "backward", "update"]
_PHASES = get_args(Phase)


@with_config(extra="forbid")
@dataclass(frozen=True)
class Plan:
    """The fault at the moment when the first rank of ``node`` enters ``phase`` of ``step`` of a
    case.

    ``case`` counts, from 1, those that have a rank there; ``seconds``: how long it lasts, 0: to the
    end of the run.
    """

    kind: str
    node: Annotated[int, Field(ge=0)] = 0
    case: Annotated[int, Field(ge=1)] = 1
    step: Annotated[int, Field(ge=0)] = 1
    phase: Phase = "forward"
    seconds: Annotated[float, Field(gt=0, le=3600)] = 0.0

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan in ``text``.

        :raises SelectionError: nothing that can be done.
        """
        kind, *words = text.split(",")
        if kind not in KINDS:
            raise _problem("unknown kind of fault", nearest(kind, KINDS, "kinds"), text)
        given = {word: word.partition("=")[::2] for word in words}
        wrong: object = "kind"  # which comes first, alone: a word may not say another
        try:
            fields = dict(given.values())
            if wrong not in fields:
                return TypeAdapter(cls).validate_python({"kind": kind, **fields})
        except ValidationError as error:
            wrong = error.errors()[0]["loc"][0]
        word = next(word for word, (name, _) in given.items() if name == wrong)
        remedy = f"write KIND,node=N,case=N,step=N,phase={'|'.join(_PHASES)},seconds=S"
        raise _problem(f"{word!r} is not a valid field of a fault", remedy, text)

    def applied(
        self, cases: Sequence[Case], nodes: int, ranks_per_node: int, text: str = ""
    ) -> list[Case]:
        """``cases`` with the fault in one of them; ``text``: what was typed.

        :raises SelectionError: there is no such node, case or step.
        """
        text = text or str(self)
        if self.node >= nodes:
            raise _problem(f"node {self.node} is unknown", f"valid: node=0 to {nodes - 1}", text)
        rank = self.node * ranks_per_node
        there = [c for c in cases if not c.skip and _on_nodes(c) and c.world > rank]
        if self.case > len(there):
            what = f"case={self.case}, but {len(there)} cases have a rank on node {self.node}"
            raise _problem(
                what, f"valid: case=1 to {len(there)}" if there else "choose other cases", text
            )
        struck = there[self.case - 1]
        if not struck.steps:
            what = f"{struck.id} trains nothing and has no steps"
            raise _problem(what, "set case= to the number of a case that trains a model", text)
        if self.step >= struck.steps:
            what = f"{struck.id} has no step {self.step}"
            raise _problem(what, f"valid: step=0 to {struck.steps - 1}", text)
        fault = Fault(self.kind, rank, self.step, self.phase, (), seconds=self.seconds)  # type: ignore[arg-type]
        return [replace(c, fault=fault) if c is struck else c for c in cases]

    def __str__(self) -> str:
        words = (f"{name}={value}" for name, value in vars(self).items() if name != "kind")
        return ",".join((self.kind, *words))


def for_head(
    cases: Sequence[Case], nodes: int, ranks_per_node: int, plan: str
) -> dict[str, Any] | None:
    """The faults that the head of a cluster gets; ``None``: none are planned.

    :raises SelectionError: ``plan``, that of ``--fault``, cannot be done in these cases.
    """
    if plan:
        given = Plan.parse(plan)
        given.applied(cases, nodes, ranks_per_node, plan)
        return {"plan": vars(given)}
    struck = any(case.fault is not None and case.fault.strikes_nodes for case in cases)
    return {} if struck else None


def with_planned(cases: Sequence[Case], facts: Mapping[str, Any]) -> list[Case]:
    """``cases`` as the head of nodes with these ``facts`` can run them: with the plan of
    ``--fault``, and skipped where one plans a fault of nodes and none are made, or it is on none.
    """
    if "faults" not in facts:
        return without_node_faults(cases)
    given = facts["faults"].get("plan")
    cases = [case if _on_nodes(case) else without_node_faults([case])[0] for case in cases]
    if given is None:
        return cases
    return Plan(**given).applied(cases, int(facts["nodes"]), int(facts["ranks_per_node"]))


def _on_nodes(case: Case) -> bool:
    return not BACKENDS[case.backend].threads


def _problem(what: str, remedy: str, text: str) -> SelectionError:
    return SelectionError(Problem(what, remedy, f"--fault {text}"))
