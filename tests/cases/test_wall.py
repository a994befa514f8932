"""A judged class changes nothing but its own ranks: no check, no oracle, no other system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

#: A class that never reduces, and one that is sound; ``{patch}`` stands in ``capabilities``.
NEVER = """
import torch
from shardproof.impls.mutants.triggers import Nothing
from shardproof.impls.reference.ddp import DDP, ReferenceDDP


class Mine(ReferenceDDP):
    @classmethod
    def capabilities(cls, options):
{patch}
        return super().capabilities(options)

    def setup(self, *given, **named):
        DDP.reduce = lambda self, bucket: Nothing()
        super().setup(*given, **named)
"""
SOUND = """
import torch
from shardproof.impls.reference.ddp import ReferenceDDP

{patch}

class Mine(ReferenceDDP):
    @classmethod
    def capabilities(cls, options):
{inner}
        return super().capabilities(options)
"""

#: What a class may try, as lines of a module.
PATCHES = {
    "eps of a layer norm": """
import torch.nn.functional as F
norm = F.layer_norm
F.layer_norm = lambda x, s, weight=None, bias=None, eps=1e-5: norm(x, s, weight, bias, 0.1)
""",
    "rate of SGD": """
kept = torch.optim.SGD.step
def halved(self, closure=None):
    for group in self.param_groups:
        group["lr"] /= 2
    try:
        return kept(self, closure)
    finally:
        for group in self.param_groups:
            group["lr"] *= 2
torch.optim.SGD.step = halved
""",
    "json": """
import json
json.loads = lambda *given, **named: {}
""",
    "hashes": """
import hashlib
hashlib.sha256 = lambda *given: hashlib.md5(b"")
""",
    "equality of tensors": """
torch.equal = lambda *given: True
torch.allclose = lambda *given, **named: True
""",
    "every check": """
from shardproof import checks
from shardproof.checks import Outcome
checks.decide = lambda name, figures: Outcome(name, "pass", "")
checks.measure = lambda name, evidence: []
""",
    "tolerance": """
from shardproof.checks import numbers
numbers.powerless = lambda *given: {}
for name in ("closeness", "bitwise"):
    setattr(numbers, name, lambda *given: numbers.Comparison(0.0, 1.0))
""",
    "the verdict": """
from shardproof.cases import leader, verdict
verdict.verdict_of = lambda outcomes: ("pass", "")
leader.decide_case = lambda account: __import__("sys").exit(0)
""",
}
#: What becomes of a sound class: some patches change what it computes or leaves itself.
ITS_OWN = {"eps of a layer norm": {"fail"}, "rate of SGD": {"fail"}, "hashes": {"pass", "fail"}}


def indented(lines: str) -> str:
    return "\n".join(f"        {line}" for line in ["import torch", *lines.strip().splitlines()])


def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> dict[str, CaseResult]:
    """The result of the class in each module, and of ``reference/ddp`` after them all."""
    cases: list[Case] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        given: dict[str, Any] = {"workload": WorkloadSpec("charnames_gpt")}
        given["checks"] = ("equivalence", "replicas", "traffic")
        cases.append(made_case(f"{name}:Mine", {"replicate": 2}, id=name, **given))
    cases.append(replace(cases[0], id="ours", implementation="reference/ddp"))
    results, _ = run_cases(cases, 1, lambda result: None)
    return {result.id: result for result in results}


def verdicts(results: dict[str, CaseResult]) -> dict[str, str]:
    return {name: result.verdict for name, result in results.items()}


def test_no_patch_makes_a_class_pass_that_never_reduces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        f"never{n}": NEVER.format(patch=indented(patch)) for n, patch in enumerate(PATCHES.values())
    }
    results = judged(tmp_path, monkeypatch, **texts)
    expected = dict.fromkeys(texts, "fail") | {"ours": "pass"}
    assert verdicts(results) == expected, [r.reason for r in results.values()]


def test_a_patch_that_changes_its_own_numbers_fails_and_others_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, expected = {}, {"ours": {"pass"}}
    for number, (name, patch) in enumerate(PATCHES.items()):
        own = ITS_OWN.get(name, {"pass"})
        texts[f"loaded{number}"] = SOUND.format(patch=patch, inner="        pass")
        texts[f"asked{number}"] = SOUND.format(patch="", inner=indented(patch))
        expected |= {f"loaded{number}": own, f"asked{number}": own}
    results = judged(tmp_path, monkeypatch, **texts)
    assert not [
        (name, result.verdict, result.reason[:300])
        for name, result in results.items()
        if result.verdict not in expected[name]
    ]


#: Systems of which a leader asks more than a declaration: emulators, meetings, schedules, offers.
ASKED = ("async_sgd", "diloco", "local_sgd", "pipeline", "sampler", "stopping", "algorithms")


def test_an_empty_subclass_is_judged_as_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Selection([], tier="quick", expression="in_memory").cases(installed())
    theirs = {
        name: next(case for case in known if case.implementation == f"reference/{name}")
        for name in ASKED
    }
    theirs["lossy"] = next(
        case
        for case in known
        if case.implementation == "reference/ddp" and "powersgd" in str(case.options)
    )
    lines = ["from shardproof import registry"]
    for name, case in theirs.items():
        lines += ["", f"class {name}(registry.load({case.implementation!r})):", "    pass"]
    (tmp_path / "empty_classes.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = [
        replace(case, id=name, implementation=f"empty_classes:{name}")
        for name, case in theirs.items()
    ]
    results, _ = run_cases([*theirs.values(), *ours], 1, lambda result: None)
    by_id = {result.id: result for result in results}
    for name, case in theirs.items():
        mine, its = by_id[name], by_id[case.id]
        assert (mine.verdict, mine.reason) == (its.verdict, its.reason), name
        assert its.verdict.startswith("pass"), its.reason
        assert mine.worst_error == its.worst_error


ENDS = """
import os, sys, time
from shardproof.impls.reference.ddp import ReferenceDDP

{outer}

class Mine(ReferenceDDP):
    @classmethod
    def capabilities(cls, options):
        {inner}
        return super().capabilities(options)
"""
ENDINGS = {
    "import": ("os._exit(3)", "pass", "crash", "ended its process (exit code 3)"),
    "asked": ("", "os._exit(3)", "fail", "ended its process (exit code 3)"),
    "killed": ("", "os.kill(os.getpid(), 9)", "fail", "ended its process (SIGKILL)"),
    "odd": ("", "return {1: 2}", "fail", "returned a dict, not Capabilities"),
    "raises": ("", "raise KeyError('status')", "fail", "raised KeyError('status')"),
}


def test_a_class_that_ends_its_process_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        name: ENDS.format(outer=outer, inner=inner) for name, (outer, inner, *_) in ENDINGS.items()
    }
    results = judged(tmp_path, monkeypatch, **texts)
    for name, (_, _, verdict, says) in ENDINGS.items():
        assert results[name].verdict == verdict, results[name].reason
        assert says in results[name].reason, results[name].reason
    assert results["ours"].verdict == "pass"


FORGED = """
import json
from pathlib import Path
from shardproof import tensor_bytes
from shardproof.launch import outcome
from shardproof.impls.reference.ddp import ReferenceDDP


class Mine(ReferenceDDP):
    def close(self):
        super().close()
        {line}
"""
FORGERIES = {
    "no_outcome": (
        "outcome.write_whole = lambda file, text: Path(file).write_text('{}')",
        "its exit report cannot be read",
    ),
    "another_rank": (
        "outcome.RankOutcome.store = lambda self, file: Path(file).write_text("
        "json.dumps({**vars(self), 'rank': 7}, default=str))",
        "its exit report cannot be read: the report belongs to rank 7",
    ),
    "no_record": (
        "tensor_bytes.dump = lambda path, record: Path(path).write_bytes(b'nothing')",
        "left a record that cannot be read",
    ),
    "other_record": (
        "kept = tensor_bytes.dump; tensor_bytes.dump = lambda path, record: "
        "kept(path, {**record, 'rank': 7})",
        "left a record that cannot be read: the record belongs to rank 7",
    ),
}


def test_what_a_rank_leaves_is_read_as_a_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {name: FORGED.format(line=line) for name, (line, _) in FORGERIES.items()}
    results = judged(tmp_path, monkeypatch, **texts)
    for name, (_, says) in FORGERIES.items():
        assert results[name].verdict == "fail", (name, results[name].verdict, results[name].reason)
        assert says in results[name].reason, results[name].reason
    assert results["ours"].verdict == "pass"


CUTS = """
import os
from shardproof.impls.reference.ddp import ReferenceDDP


class Mine(ReferenceDDP):
    def close(self):
        super().close()
        maps = [line.split() for line in open("/proc/self/maps")]
        os.truncate(next(words[-1] for words in maps if words[-1].endswith("/heartbeat")), 0)
"""


def test_a_rank_that_cuts_the_heartbeat_ends_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = judged(tmp_path, monkeypatch, cuts=CUTS)
    assert verdicts(results) == {"cuts": "crash", "ours": "pass"}, results["cuts"].reason
    assert "SIGBUS" in results["cuts"].reason


LINES = """
import os
from shardproof.impls.reference.ddp import ReferenceDDP

def sockets():
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(n) for n in names if os.path.exists(n) and "socket:" in os.readlink(n)]

class Mine(ReferenceDDP):
    def setup(self, *given, **named):
        super().setup(*given, **named)
        if left := sockets():
            raise RuntimeError(f"lines are left: {left}")
"""


def test_ranks_inherit_no_line_of_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = judged(tmp_path, monkeypatch, lines=LINES)
    assert verdicts(results) == {"lines": "pass", "ours": "pass"}, results["lines"].reason


def test_a_record_declares_what_was_heard_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import os, threading
from dataclasses import replace
from shardproof.impls.reference.ddp import ReferenceDDP


class Mine(ReferenceDDP):
    @classmethod
    def capabilities(cls, options):
        told = super().capabilities(options)
        in_rank = threading.current_thread().name.startswith("rank")
        return replace(told, loss_factor="2") if in_rank else told
"""
    (tmp_path / "two_faced.py").write_text(text)
    results = judged(tmp_path, monkeypatch, two_faced=text)
    assert verdicts(results) == {"two_faced": "pass", "ours": "pass"}
