"""Other ways in: pytest collects scenarios, Python asks for a DataFrame, doctor looks around."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from commands import pytest_here, python

from shardproof import prove, verdicts
from shardproof.backends.mpi import found as mpi_found
from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec
from shardproof.doctor import findings as doctor
from shardproof.errors import SelectionError
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.zero1 import ReferenceZero1
from shardproof.runs.run_folder import read

ROOT = Path(__file__).parents[2]
CASE = "ddp-gpt::{}::in_memory::replicate2::sgd::noclip::fp64::quick"


def test_pytest_collects_cases_by_their_ids() -> None:
    done = pytest_here("scenarios", "--collect-only", "-k", "ddp-gpt and in_memory")
    assert done.returncode == 0, done.stdout
    assert CASE.format("reference/ddp+small_buckets") in done.stdout


def test_pytest_shows_the_judges_reason_and_works_with_xdist(tmp_path: Path) -> None:
    told = tmp_path / "junit.xml"
    selection = "replicate2 and in_memory and fp64 and sgd and noclip"
    files = "scenarios/conformance/data/ddp-gpt.yaml"
    impls = ("--impl", "mutants/ddp_never_reduces", "--impl", "reference/ddp")
    more = ("-n", "2", "-k", selection, *impls, f"--junitxml={told}")
    done = python("-m", "pytest", "-p", "no:cacheprovider", files, *more)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "differs from the oracle" in done.stdout, done.stdout
    assert f"-k '{CASE.format('mutants/ddp_never_reduces')}'" in done.stdout
    assert ElementTree.parse(told).getroot()[0].get("failures") == "1"


def test_pytest_refuses_a_class_that_cannot_be_loaded() -> None:
    done = pytest_here("scenarios", "--impl", "json:loads", "--collect-only")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "not a subclass of Implementation - correct the name or the module" in done.stderr


def test_the_fixture_judges_a_class_in_anybodys_tests(tmp_path: Path) -> None:
    """An entry point brings it: no conftest, no option."""
    shutil.copy(ROOT / "tests" / "support" / "adopted.py", tmp_path)
    (tmp_path / "test_mine.py").write_text(
        "from adopted import BecameDDP, GreedyZero1\n"
        "ARGUMENTS = {'worlds': (2,), 'optimizer': 'adamw'}\n"
        "def test_sound(shardproof):\n"
        "    assert list(shardproof(GreedyZero1, **ARGUMENTS)['verdict']) == ['pass', 'pass']\n"
        "def test_defective(shardproof):\n"
        "    shardproof(BecameDDP, **ARGUMENTS)\n"
        "def test_elsewhere(shardproof):\n"
        "    shardproof('reference/ddp', worlds=(2,), meshes=[{'tensor': 2}])\n"
    )
    done = pytest_here("-q", "-rs", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "2 of 2 cases:" in done.stdout and "nothing is sharded on any rank" in done.stdout
    assert "nothing was judged: " in done.stdout and "has no axis tensor" in done.stdout


def test_prove_returns_a_frame() -> None:
    frame = prove("reference/naive_ddp", worlds=(2, 2), lanes=("fp64", "bitwise"), jobs=2)
    assert list(frame["verdict"]) == ["pass", "pass"]
    assert set(frame["world"]) == {2} and (frame["error"] < frame["bound"]).any()
    with pytest.raises(SelectionError, match="reference/ddp"):
        prove("reference/dpp")
    with pytest.raises(SelectionError, match="in_memory"):
        prove("reference/ddp", backends=("carrier_pigeon",))


class Sharded(ReferenceZero1):
    """A user's own: nothing but the parent's."""


class IgnoresWarmup(ReferenceDDP):
    def make_optimizer(self) -> torch.optim.Optimizer:
        self.spec = replace(self.spec, warmup_steps=0)
        return super().make_optimizer()


class DropsWeightDecay(ReferenceDDP):
    def make_optimizer(self) -> torch.optim.Optimizer:
        self.spec = replace(self.spec, weight_decay=0.0)
        return super().make_optimizer()


class OnlyGloo(ReferenceDDP):
    @classmethod
    def capabilities(cls, options: Any) -> Any:
        return replace(super().capabilities(options), backends=("gloo",))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("ignored", [IgnoresWarmup, DropsWeightDecay])
def test_an_optimizer_by_its_name_shows_what_is_ignored(ignored: Any, optimizer: str) -> None:
    (row,) = prove(ignored, worlds=1, optimizer=optimizer).to_dict("records")
    assert row["verdict"] == "fail", row


def test_an_optimizer_spec_is_taken_as_it_is() -> None:
    (row,) = prove(DropsWeightDecay, worlds=1, optimizer=OptimizerSpec()).to_dict("records")
    assert row["verdict"] == "pass", row["reason"]


def test_prove_takes_a_backend_that_the_system_runs_on() -> None:
    given = prove(OnlyGloo, worlds=(2,))
    assert [(row.backend, row.verdict) for row in given.itertuples()] == [("gloo", "pass")]
    asked = prove(OnlyGloo, worlds=(2,), backends="in_memory")
    assert [(row.backend, row.verdict) for row in asked.itertuples()] == [("in_memory", "skip")]


def test_prove_takes_the_axis_that_is_claimed() -> None:
    (row,) = prove(Sharded, worlds=(2,), lanes=("fp64",)).to_dict("records")
    assert row["verdict"] == "pass" and "::shard2::" in row["case"], row["reason"]
    hybrid = {"sharding_strategy": "HYBRID_SHARD"}
    several = r"the axes replicate and shard - give axis='replicate' or axis='shard' .*"
    with pytest.raises(
        SelectionError, match=several + r"meshes=\[\{'replicate': 2, 'shard': 2\}\]"
    ):
        prove("reference/fsdp", options=hybrid)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"worlds": (0,)}, r"prove: mesh\[0\].replicate\[0\]: should be .* equal to 1 \(0\)"),
        ({"worlds": 1025}, r"mesh\[0\].replicate\[0\]: should be less than .* 1024 \(1025\)"),
        ({"worlds": "2"}, r"should be a valid integer \('2'\) - write 2 without quotes"),
        ({"worlds": ()}, "worlds, backends or lanes is empty - give one"),
        ({"worlds": (2, True)}, r"should be a valid integer \(True\)"),
        (
            {"meshes": [{"foo": 2}]},
            r"unknown key mesh\[0\].foo \(foo\) - valid keys: context, expert, pipe",
        ),
        ({"meshes": [{"replicate": 0}]}, r"mesh\[0\].replicate\[0\]: should be .* 1 \(0\)"),
        ({"meshes": [{}]}, r"mesh\[0\]: should have at least 1 item"),
        ({"axis": "rows"}, r"unknown key mesh\[0\].rows .* pipe, replicate, shard, tensor"),
        ({"lanes": ("nolane",)}, r"lane\[0\]: unknown value \(nolane\) - valid names: bitwise"),
        ({"lanes": ()}, "worlds, backends or lanes is empty"),
        ({"backends": ()}, "worlds, backends or lanes is empty"),
        ({"checks": ("none",)}, r"unknown check \(none\) - checks: .*equivalence"),
        ({"checks": ()}, r"checks: should have at least 1 item"),
        ({"dtype": "int8"}, r"unknown value \(int8\) - valid names: bfloat16"),
        ({"optimizer": "adam"}, "did you mean adamw"),
        ({"steps": 0}, r"steps: should be greater than or equal to 1 \(0\)"),
        ({"jobs": 0}, r"jobs must be an int, 1 or more \(0\)"),
        ({"deadline": -1.0}, r"deadline: should be greater than 0 \(-1.0\) - .*seconds"),
        ({"traits": ("notrait",)}, r"prove: unknown trait \(notrait\) - "),
        ({"clip": "off"}, r"clip\[0\]: should be a valid number \('off'\) - correct it"),
        ({"steps": "23"}, r"steps: should be a valid integer \('23'\) - write 23 without quotes"),
        ({"dtype": torch.int8}, r"unknown value \(int8\) - valid names: bfloat16"),
        ({"dtype": float}, r"dtype: wrong type \(<class 'float'>\) - give the name of a dtype"),
        (
            {"precision": {"reduce": 5}},
            r"precision\['reduce'\]: wrong type \(5\) - give the na",
        ),
        ({"optimizer": torch.optim.SGD}, r"must be given as a name \(SGD\) - optimizer='sgd'"),
        ({"clip": (-1.0,)}, r"clip\[0\]: should be greater than 0 \(-1.0\)"),
        ({"clip": (0.5,), "lanes": ("bitwise",)}, "lane bitwise needs clipping off"),
        ({"clip": (0.5,), "lanes": ("dyadic",)}, "lane dyadic needs clipping off"),
        (
            {"options": {"dtype": Path("x")}},
            r"this value cannot be stored in a scenario \(PosixPath\('x'\)\) - give text",
        ),
        ({"axis": ""}, "unknown key"),
        ({"options": 5}, r"options: wrong type \(5\) - give a mapping"),
        ({"precision": 5}, r"precision: wrong type \(5\) - give a mapping"),
        ({"meshes": 5}, r"mesh\[0\]: should be a mapping \(5\)"),
        ({"traits": 5}, r"traits\[0\]: should be a valid string"),
        ({"dtype": ""}, "unknown value"),
        (
            {"workload": "charnames_gpt", "lanes": ("fp64", "dyadic")},
            "charnames_gpt has no form for lane dyadic.* have one: dyadic_mlp",
        ),
        ({"optimizer": "adamw", "lanes": ("dyadic",)}, r"lane dyadic .*plain SGD.* \(adamw\)"),
    ],
)
def test_prove_refuses_before_anything_runs(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(SelectionError, match=says):
        prove("reference/ddp", results=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_prove_refuses_torchs_own_classes_and_says_what_to_write() -> None:
    for given in (torch.optim.AdamW, torch.optim.AdamW([torch.zeros(1)])):
        with pytest.raises(SelectionError) as refused:
            prove(optimizer=given)
        told = str(refused.value)
        assert "def mine(groups, settings): return AdamW(groups, **settings.arguments)" in told
        assert "optimizer='adamw'" in told
    with pytest.raises(SelectionError, match="this class of torch cannot be called with"):
        prove(optimizer="torch.optim:SGD", worlds=(1,))


def test_prove_refuses_results_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for given, says in (
        (tmp_path / "file", "results: is a file"),
        (tmp_path / "file" / "run", "file' is a file"),
        ("", "results is an empty path"),
        (3, "results: wrong type"),
    ):
        with pytest.raises(SelectionError, match=says):
            prove("reference/ddp", results=given)  # type: ignore[arg-type]


def test_prove_takes_dtypes_of_torch() -> None:
    (row,) = prove(
        "reference/ddp", worlds=1, dtype=torch.float32, lanes=("working_precision",)
    ).to_dict("records")
    assert row["dtype"] == "float32" and verdicts.kind(row["verdict"]).startswith("pass"), row


def test_prove_names_a_call_that_judges_the_case_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = str(ROOT / "tests" / "support")
    monkeypatch.syspath_prepend(support)
    monkeypatch.setenv("PYTHONPATH", f"{support}:{ROOT}")
    spec = OptimizerSpec("sgd", momentum=0.5)
    more: dict[str, Any] = {"workload": WorkloadSpec("digits_cnn", seed=3), "optimizer": spec}
    for given in ({}, {"clip": (0.5,), "traits": ["tied"]}, more):
        frame = prove("bad_implementations:NanLoss", worlds=(1,), checks=["norm"], **given)
        (row,) = frame.to_dict("records")
        program, *words = shlex.split(row["rerun"])
        assert program == "python"
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert {row["case"], row["verdict"]} <= {*done.stdout.split("\n")}, done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "raises_on_import:Mine",
            r"'raises_on_import:Mine' cannot be imported: ImportError: libfast",
        ),
        ("json:loads", "not a subclass of Implementation - correct the name or the module"),
    ],
)
def test_prove_refuses_what_cannot_be_loaded(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        prove(name, worlds=(1,), results=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_prove_names_a_command_that_reruns_and_hides_no_earlier_result(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = str(ROOT / "tests" / "support")
    monkeypatch.syspath_prepend(support)
    monkeypatch.setenv("PYTHONPATH", support)
    name, run = "bad_implementations:NanLoss", tmp_path / "a run"
    (row,) = prove(name, worlds=(1,), results=run).to_dict("records")
    assert row["verdict"] == "fail"
    program, *words = shlex.split(row["rerun"])
    assert program == "shardproof"
    code, out, err = command(*words, "--dry-run")
    assert (code, out.split()) == (0, [row["case"]]), (row["rerun"], err)
    with pytest.raises(SelectionError, match="this run has another case with the same id"):
        prove(name, worlds=(1,), results=run, steps=1)
    assert [case.verdict for case in read(run).cases] == ["fail"]


def test_prove_weighs_memory_by_itself(tmp_path: Path) -> None:
    prove("reference/zero1", worlds=(2,), results=tmp_path / "run")
    (case,) = read(tmp_path / "run").cases
    memory = case.check("memory")
    assert memory is not None and memory.status == "pass"


def test_the_package_stays_light() -> None:
    code = "import sys, shardproof; assert not {'torch', 'pandas', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_doctor_names_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    finding = doctor._interface()
    assert finding.state == "bad" and "this machine has no interface eth77" in finding.found
    assert ", or set the variable to one of" in finding.remedy
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert doctor._interface().state == "good"


def test_doctor_names_an_mpirun_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\necho 'AssertionError: each process is alone' >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(mpi_found, "problem", lambda: None)
    monkeypatch.setattr(
        mpi_found, "find", lambda: mpi_found.MpiRuntime(str(script), "MPICH", "made up")
    )
    (finding,) = doctor._mpi()
    assert finding.state == "bad" and "each process is alone" in finding.found
    assert "one MPI only" in finding.remedy


def test_doctor_tells_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEMORY_BYTES", 1 << 60)
    findings = {finding.what: finding for finding in doctor.examine(tmp_path / "results")}
    assert findings["memory"].state == "bad" and findings["memory"].remedy
    assert findings["results"].state == "good"
    assert findings["gloo over loopback"].state == "good"
    assert findings["mpi"].state == ("good" if mpi_found.problem() is None else "note")
    assert "mpi slots" in findings or mpi_found.problem() is not None
    assert all(finding.remedy for finding in findings.values() if finding.state != "good")
