"""A run tells of a user's own class which code was judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.runs import code
from tests.support.commands import here

CLASS = """\
from shardproof.impls.reference.ddp import ReferenceDDP


class Mine(ReferenceDDP):
    def step(self, batch, observe):
        if "WORD" == self.spec.name:
            raise RuntimeError("wrong")
        return super().step(batch, observe)
"""
CASES = ("ddp-gpt", "--tier", "full", "--impl", "owncode:Mine", "--world", "1", "-j", "1")


def test_verdicts_of_other_code_are_told(tmp_path: Path) -> None:
    chosen = ("-k", "in_memory and fp64 and noclip", "--results", "r")
    again = ("run", "--rerun-failed", "--results", "r", "-j", "1")
    file = tmp_path / "owncode.py"
    outputs = []
    first = ("run", *CASES, *chosen)
    for word, arguments in (("adamw", first), ("adamw", again), ("sgd", again), ("adamw", again)):
        file.write_text(CLASS.replace("WORD", word))
        done = here(*arguments, cwd=tmp_path, paths=[tmp_path])
        outputs.append(done.stdout + done.stderr)
    assert "1 crash, 1 pass" in outputs[0], outputs[0]
    assert "from before a change" not in outputs[1]
    assert "kept 1 verdict from before a change of owncode:Mine" in outputs[2]
    invocations = json.loads((tmp_path / "r" / "run.json").read_text())["invocations"]
    digests = [one["code"]["owncode:Mine"] for one in invocations]
    assert digests[0] == digests[1] != digests[2]


def test_files_are_found_by_every_form_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    places = ("alone1.py", "spaces1/inner.py", "packed1/__init__.py", "packed1/inner.py")
    for place in places:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(place)
    names = ("alone1:A", "spaces1.inner:A", "packed1:A", "packed1.inner:A", "spaces1/inner.py:A")
    found = code.of([*names, "reference/ddp", "nowhere1:A", "__main__:A"])
    assert set(found) == set(names) and len(set(found.values())) == len(places)
