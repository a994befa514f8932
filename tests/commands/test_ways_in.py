"""Other ways in: pytest collects scenarios, Python asks for a DataFrame, doctor looks around."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardproof import prove
from shardproof.commands import doctor
from shardproof.errors import SelectionError
from shardproof.impls.reference.zero1 import ReferenceZero1
from shardproof.runs.run_folder import read

ROOT = Path(__file__).parents[2]
CASE = "ddp-gpt::{}::in_memory::replicate2::sgd::noclip::fp64::quick"


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_pytest_collects_cases_by_their_ids() -> None:
    done = run_pytest("scenarios", "--collect-only", "-k", "ddp-gpt and in_memory")
    assert done.returncode == 0, done.stdout
    assert CASE.format("reference/ddp+small_buckets") in done.stdout


def test_pytest_shows_the_judges_reason_and_works_with_xdist(tmp_path: Path) -> None:
    told = tmp_path / "junit.xml"
    selection = "replicate2 and in_memory and fp64 and sgd and noclip"
    files = "scenarios/conformance/data/ddp-gpt.yaml"
    impls = ("--impl", "mutants/ddp_never_reduces", "--impl", "reference/naive_ddp")
    done = run_pytest(files, "-n", "2", "-k", selection, *impls, f"--junitxml={told}")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "differs from the oracle" in done.stdout, done.stdout
    assert f"-k '{CASE.format('mutants/ddp_never_reduces')}'" in done.stdout
    assert ElementTree.parse(told).getroot()[0].get("failures") == "1"


def test_pytest_refuses_a_class_that_cannot_be_loaded() -> None:
    done = run_pytest("scenarios", "--impl", "json:loads", "--collect-only")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "not a subclass of Implementation - nothing was run" in done.stderr


def test_prove_returns_a_frame() -> None:
    frame = prove("reference/naive_ddp", worlds=(2,), lanes=("fp64", "bitwise"), jobs=2)
    assert list(frame["verdict"]) == ["pass", "pass"]
    assert set(frame["world"]) == {2} and (frame["error"] < frame["bound"]).any()
    with pytest.raises(SelectionError, match="reference/ddp"):
        prove("reference/dpp")
    with pytest.raises(SelectionError, match="in_memory"):
        prove("reference/ddp", backends=("carrier_pigeon",))


class Sharded(ReferenceZero1):
    """A user's own: nothing but the parent's."""


def test_prove_takes_the_axis_that_is_claimed() -> None:
    (row,) = prove(Sharded, worlds=(2,), lanes=("fp64",)).to_dict("records")
    assert row["verdict"] == "pass" and "::shard2::" in row["case"], row["reason"]
    hybrid = {"sharding_strategy": "HYBRID_SHARD"}
    with pytest.raises(SelectionError, match=r"meshes=\[\{'replicate': 2, 'shard': 2\}\].* axis"):
        prove("reference/fsdp", options=hybrid)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"worlds": (0,)}, r"worlds has an invalid value \(0\) - whole numbers from 1 to 1024"),
        ({"worlds": "2"}, r"worlds is not a list of numbers \('2'\) - .*worlds=\(2, 3\)"),
        ({"worlds": ()}, "worlds is not a list of numbers"),
        ({"worlds": (2, True)}, r"worlds has an invalid value \(True\)"),
        ({"meshes": [{"foo": 2}]}, r"unknown axis \({'foo': 2}\) - an axis \(pipe, replicate, "),
        ({"meshes": [{"replicate": 0}]}, r"meshes has an invalid value \(0\)"),
        ({"meshes": [{}]}, r"meshes: not a mesh"),
        ({"axis": "rows"}, r"unknown axis \(rows\) - axis: pipe, replicate, shard, tensor"),
        ({"lanes": ("nolane",)}, r"unknown lanes \(nolane\) - lanes: bitwise, dyadic"),
        ({"lanes": ()}, "lanes is empty"),
        ({"checks": ("none",)}, r"unknown checks \(none\) - checks: .*equivalence"),
        ({"dtype": "int8"}, r"unknown dtype \(int8\) - dtype: float64"),
        ({"optimizer": "adam"}, "did you mean adamw"),
        ({"steps": 0}, "steps has an invalid value"),
        ({"deadline": -1.0}, "deadline is not a time"),
        ({"traits": ("notrait",)}, r"prove: unknown trait \(notrait\) - "),
        ({"clip": 0.5}, "clip is not a list of norms"),
        ({"clip": (-1.0,)}, r"clip: not a norm \(-1.0\)"),
        (
            {"clip": (0.5,), "lanes": ("bitwise",)},
            r"lane bitwise .* \(0.5\) - .*fp64, working_precision",
        ),
        (
            {"workload": "charnames_gpt", "lanes": ("fp64", "dyadic")},
            "charnames_gpt has no form for lane dyadic.* have one: dyadic_mlp",
        ),
        ({"optimizer": "adamw", "lanes": ("dyadic",)}, r"lane dyadic .*SGD only \(adamw\)"),
    ],
)
def test_prove_refuses_before_anything_runs(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(SelectionError, match=says):
        prove("reference/ddp", results=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "raises_on_import:Mine",
            r"'raises_on_import:Mine' cannot be imported: ImportError: libfast",
        ),
        ("json:loads", "not a subclass of Implementation - nothing was run"),
    ],
)
def test_prove_refuses_what_cannot_be_loaded(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        prove(name, worlds=(1,), results=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_prove_weighs_memory_by_itself(tmp_path: Path) -> None:
    prove("reference/zero1", worlds=(2,), results=tmp_path / "run")
    (case,) = read(tmp_path / "run").cases
    told = {check["check"]: check["status"] for check in case["checks"]}
    assert told["memory"] == "pass"


def test_the_package_stays_light() -> None:
    code = "import sys, shardproof; assert not {'torch', 'pandas', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_doctor_tells_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEMORY_BYTES", 1 << 60)
    findings = {finding.what: finding for finding in doctor.examine(tmp_path / "results")}
    assert findings["memory"].state == "bad" and findings["memory"].remedy
    assert findings["results"].state == "good"
    assert findings["gloo over loopback"].state == "good"
    assert all(finding.remedy for finding in findings.values() if finding.state != "good")
