"""A case as a scenario file, and back: what is shrunk is always what the file says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from shardproof.case import Case, CheckpointPlan, WorkloadSpec
from shardproof.cases import kinds
from shardproof.contract import OptimizerSpec
from shardproof.errors import ScenarioError
from shardproof.files import to_plain
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import DTYPES, expand
from shardproof.scenarios.vocabulary import Vocabulary
from shardproof.workloads import suggested_groups

#: Labels of options and policies, which have none of their own any more.
_LABEL = "shrunk"


def text(case: Case, about: str, sees: str, head: str = "") -> str:
    """The scenario file of ``case`` alone; ``head``: lines of comments in front."""
    document = {"name": name_of(case), "about": about, "sees": [sees], **_fields(case)}
    body = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100)
    return "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines()) + body


def name_of(case: Case) -> str:
    """The name of the scenario: that of the system, in the letters that names may have."""
    system = re.sub(r"[^a-z0-9]+", "-", case.implementation.lower()).strip("-")
    return f"shrunk-{system}"[:60].rstrip("-")


def read(document: str, vocabulary: Vocabulary, file: str = "<shrunk>") -> Case:
    """The first case of a scenario file.

    :raises ScenarioError: what it combines may not be combined so.
    """
    return expand(load_text(document, file), vocabulary)[0]


def required(case: Case, vocabulary: Vocabulary) -> Case:
    """``case`` as its scenario file has it, at the same depth.

    :raises ScenarioError: no file can have it.
    """
    return at_depth(read(text(case, "a case", "a fault"), vocabulary), case)


def as_file(case: Case, vocabulary: Vocabulary) -> Case | None:
    """As :func:`required`; ``None``: no file can have it."""
    try:
        return required(case, vocabulary)
    except ScenarioError:
        return None


def at_depth(again: Case, case: Case) -> Case:
    """``again``, judged as closely as ``case``: no scenario says how closely."""
    return dataclasses.replace(again, depth=case.depth, unasked=case.unasked)


def _fields(case: Case) -> dict[str, Any]:
    trains = kinds.of(case.workload).trains
    fields: dict[str, Any] = {
        "workload": _unlike(to_plain(case.workload), WorkloadSpec("")),
        "matrix": _matrix(case, trains),
        "checks": [*case.checks],
        **({"steps": case.steps} if trains else {}),
        **({"expect": _plain(case.expect)} if case.expect else {}),
        **_plans(case),
    }
    usual = {each.name: each.default for each in dataclasses.fields(Case)}
    limits = ("deadline", "memory_gib")
    return fields | {k: getattr(case, k) for k in limits if getattr(case, k) != usual[k]}


def _matrix(case: Case, trains: bool) -> dict[str, Any]:
    options = {k: _plain(v) for k, v in case.options.items()}
    policy = dict(case.precision)
    if policy and options.get("precision") == policy:
        del options["precision"]
    own = {"name": case.implementation, "label": case.label or _LABEL, "options": options}
    matrix: dict[str, Any] = {
        "implementation": own if options else case.implementation,
        "backend": case.backend,
        "mesh": dict(case.mesh),
    }
    if trains:
        matrix["optimizer"] = _optimizer(case.optimizer, case.workload.traits)
        if case.optimizer.clip_norm is not None:
            matrix["clip"] = float(case.optimizer.clip_norm)
    if case.lane != "fp64":
        matrix["lane"] = case.lane
    # What trains nothing has a dtype for each call.
    built = {"built": case.dtype} if trains and case.dtype != DTYPES[case.lane] else {}
    if built or policy:
        matrix["precision"] = {"label": _LABEL, **built, **policy}
    return matrix


def _optimizer(spec: OptimizerSpec, traits: Collection[str]) -> Any:
    fields = _unlike(to_plain(spec), OptimizerSpec(lr=-1.0))
    fields.pop("clip_norm", None)
    if spec.groups == suggested_groups(traits):
        fields.pop("groups", None)
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
    return {"name": spec.name, **fields}


def _plans(case: Case) -> dict[str, Any]:
    plans: dict[str, Any] = {}
    if (fault := case.fault) is not None:
        given = {k: v for k, v in fault.to_dict().items() if v is not None}
        ends = {"verdict": [*given.pop("verdicts")], "says": [*given.pop("says", ())]}
        expect = {k: v for k, v in ends.items() if v} | {"rank": given.pop("blames", None)}
        plans["faults"] = [{**given, "expect": {k: v for k, v in expect.items() if v is not None}}]
    if (saves := case.checkpoint) is not None:
        plans["checkpoints"] = [_checkpoint(saves)]
    if case.changes_members:
        changes = [{"step": int(s), "members": [*ranks]} for s, ranks in case.membership.items()]
        deaths = [death.to_dict() for death in case.deaths]
        plans["membership"] = [{"label": _LABEL, "changes": changes, "deaths": deaths}]
    return plans


def _checkpoint(plan: CheckpointPlan) -> dict[str, Any]:
    fields = _unlike(plan.to_dict(), CheckpointPlan(-1))
    into = _plain(fields.pop("into", {}))
    if "precision" in into:
        into["precision"] = {"label": _LABEL, **into["precision"]}
    return {"label": _LABEL, **fields, **({"into": into} if into else {})}


def _unlike(fields: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """The ``fields`` that ``usual`` does not have so, as YAML writes them."""
    known = to_plain(usual)
    return {k: _plain(v) for k, v in fields.items() if v != known[k]}


def _plain(value: Any) -> Any:
    """``value`` of plain mappings and lists."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(one) for one in value]
    return value
