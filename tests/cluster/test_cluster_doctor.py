"""What ``shardproof doctor --cluster`` adds: the engine, the kernel's weather, Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.cluster import doctor
from shardproof.wings import Finding


def test_what_an_engine_says_of_itself_is_told(tmp_path: Path) -> None:
    info = {
        "CgroupVersion": "2",
        "CgroupDriver": "systemd",
        "MemoryLimit": True,
        "CpuCfsQuota": True,
        "DockerRootDir": str(tmp_path),
        "Runtimes": {"runc": {}, "nvidia": {}},
        "Driver": "overlay2",
    }
    version = {"Version": "28.1", "ApiVersion": "1.49"}
    found = {f.what: f for f in doctor.of_engine(info, version)}
    assert found["container engine"].found == "28.1, API 1.49, overlay2"
    assert found["cgroup"].state == found["GPUs in containers"].state == "good"
    assert "GiB free" in found["space for images"].found
    found = {
        f.what: f for f in doctor.of_engine({**info, "Runtimes": {}, "MemoryLimit": False}, {})
    }
    assert "--memory" in found["cgroup"].found and found["cgroup"].remedy
    assert found["GPUs in containers"].state == "note" and found["GPUs in containers"].remedy


def test_weather_is_tried_in_a_network_of_its_own() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*command: str) -> tuple[int, str]:
        asked.append(command)
        return (2, "Error: Specified qdisc kind is unknown.") if "netem" in command else (0, "")

    found = {f.what: f for f in doctor.weather(ask, True)}
    assert found["tc tbf"].state == found["tc htb"].state == "good"
    assert found["tc netem"].state == "note" and "sch_netem" in found["tc netem"].remedy
    assert all(command[:2] == ("unshare", "--net") for command in asked[1:])
    asked.clear()
    (told,) = doctor.weather(ask, False)
    assert told.state == "note" and len(asked) == 1
    (told,) = doctor.weather(lambda *command: (127, "no program tc"), True)
    assert told.remedy


def test_slurm_counts_where_a_controller_answers() -> None:
    assert doctor.slurm(lambda *_: (127, "no program sinfo")).found == "not installed"
    assert "no controller" in doctor.slurm(lambda *_: (1, "connection refused\nand more")).found
    told = doctor.slurm(lambda *_: (0, "2 nodes idle\n1 nodes down"))
    assert told == Finding("Slurm", "good", "2 nodes idle, 1 nodes down")


def test_a_program_that_is_missing_or_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.ask("no-such-program-here")[0] == 127
    monkeypatch.setattr(doctor, "_SECONDS", 0.05)
    assert doctor.ask("sleep", "5") == (124, "no answer within 0.05 s")
