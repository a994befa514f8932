"""Ranks on Ray: by a stand-in whose actors are processes, and by Ray itself where it is."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import LOSS, assert_equal, loader, model, trained

from shardproof import Training
from shardproof.training import on_ray

STEPS = 4
HERE = Path(__file__).parent
REAL = importlib.util.find_spec("ray") is not None
BY_REF = [str(HERE), str(HERE.parents[1])]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("cloudpickle")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    stand_in = str(HERE / "stand_in")
    monkeypatch.syspath_prepend(stand_in)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([stand_in, *BY_REF]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import ray

    yield ray
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        del sys.modules[name]


class Mine(torch.optim.Adagrad):
    """A class that actors get by value or by reference, as Ray does."""


def training(strategy: str = "zero2") -> Training:
    built = Training(model(), LOSS, loader()).optimizer("adamw", lr=1e-2, clip=0.5)
    return built.strategy(strategy)


def test_ranks_are_actors(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, losses = trained(STEPS, lr=1e-2, clip=0.5)
    monkeypatch.chdir(tmp_path)
    result = training().checkpoint("runs", every=2).run(STEPS, ranks=3, on="ray")
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9) and result.world == 3
    assert len(result.memory_stats()) == 3 and any((tmp_path / "runs").iterdir())
    assert ray.SAID[0] == "init None" and ray.SAID[-4:] == ["kill"] * 3 + ["shutdown"]


def test_the_variable_chooses_the_cluster(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = trained(STEPS, Mine, lr=0.1)
    monkeypatch.setenv("SHARDPROOF_ON", "ray://head:7")
    built = Training(model(), LOSS, loader()).optimizer(Mine, lr=0.1).strategy("zero1")
    assert_equal(dict(built.run(STEPS, ranks=2).state), expected)
    assert "init ray://head:7" in ray.SAID


def test_errors_of_a_rank_are_raised_here(ray: Any) -> None:
    def dictionaries(step: int) -> object:
        return {"inputs": 1}

    with pytest.raises(ValueError, match="a batch is dict"):
        Training(model(), LOSS, dictionaries).run(1, ranks=2, on="ray")

    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            os._exit(7)
        return LOSS(outputs, targets)

    with pytest.raises(RuntimeError, match="rank 1 was lost by Ray"):
        Training(model(), broken, loader()).run(2, ranks=2, on="ray")


def test_errors_teach(ray: Any) -> None:
    with pytest.raises(ValueError, match=r"each of the 9 ranks needs.*use fewer ranks"):
        training().run(1, ranks=9, on="ray")
    with pytest.raises(ValueError, match=r"address of a Ray cluster \(slurm\)"):
        training().run(1, ranks=2, on="slurm")
    with pytest.raises(ValueError, match=r"this backend does not run on Ray \(in_memory\)"):
        training().backend("in_memory").run(1, ranks=2, on="ray")


@pytest.mark.skipif(REAL, reason="Ray is here")
def test_without_ray_the_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"pip install 'shardproof\[ray\]'"):
        training().run(1, ranks=2, on="ray")


@pytest.mark.launches
@pytest.mark.skipif(not REAL, reason="no package ray: pip install 'shardproof[ray]'")
def test_on_ray_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(BY_REF))
    assert on_ray.PLACE_SECONDS == 60
    expected, losses = trained(STEPS, lr=1e-2, clip=0.5)
    result = training("fsdp").run(STEPS, ranks=2, on="ray")
    assert_equal(dict(result.state), expected)
    assert result.losses == pytest.approx(losses, rel=1e-9)
