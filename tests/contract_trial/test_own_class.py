"""A user's class in a package of its own, found by ``package.module:Class`` and by entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
from trial_cases import case, compared, judged, told

SOURCE = """
import torch
from shardproof.contract import Capabilities, Implementation, Piece, StepResult


class SumOfRanks(Implementation):
    strategy = "my_own"  # no profile of that name: nothing is implied

    @classmethod
    def capabilities(cls, options):
        return Capabilities(initial_state="everywhere", buffers="per_rank")

    def setup(self, build, state, optimizer, mesh, options):
        self.build, self.spec, self.comm = build, optimizer, mesh.comm("replicate")
        self.scale = options.get("scale", 1.0)
        self.module = build()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(state[name])
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=optimizer.lr, momentum=optimizer.momentum
        )

    def step(self, batch, observe):
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch.micro_batches:
            loss = self.build.loss(self.module(micro.inputs), micro)
            loss.backward()
            total += loss.detach()
        for parameter in self.module.parameters():
            self.comm.all_reduce(parameter.grad)
            parameter.grad.mul_(self.scale)
        observe("gradients_final")
        self.optimizer.step()
        observe("after_update")
        self.optimizer.zero_grad()
        return StepResult(total)

    def local_state(self, kind):
        found = dict(self.module.named_parameters()) if kind == "parameters" else {}
        if kind == "gradients":
            found = {n: p.grad for n, p in self.module.named_parameters()}
        if kind == "optimizer":
            found = {
                f"{n}.momentum_buffer": self.optimizer.state[p]["momentum_buffer"]
                for n, p in self.module.named_parameters()
            }
        return [Piece.whole(n, t.detach(), replica=self.comm.rank) for n, t in found.items()]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial_package").mkdir()
    (tmp_path / "trial_package" / "__init__.py").write_text("")
    (tmp_path / "trial_package" / "training.py").write_text(SOURCE)
    installed = tmp_path / "trial_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: trial-package\nVersion: 1.0\n"
    )
    entry = "[shardproof.implementations]\nmy/sum = trial_package.training:SumOfRanks\n"
    (installed / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
def test_by_class_and_by_entry_point() -> None:
    named = "trial_package.training:SumOfRanks"
    names = [named, "my/sum"]
    cases = [case(name, {"replicate": 3}) for name in names]
    cases.append(case(named, {"replicate": 2}, backend="gloo"))
    results = judged(cases)
    assert {r.verdict for r in results} == {"pass"}, told(results)
    assert all(compared(r) > 100 for r in results)


@pytest.mark.usefixtures("package")
def test_its_faults_are_found() -> None:
    scaled = case("my/sum", {"replicate": 2}, options={"scale": 0.5})
    (result,) = judged([scaled])
    assert result.verdict == "fail", told([result])
    assert "differs from the oracle" in result.reason
