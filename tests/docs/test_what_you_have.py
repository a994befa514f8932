"""Every example of docs/what-you-have.md passes, and fails with one thing in it changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import pytest_here

pytestmark = pytest.mark.launches

PAGE = (Path(__file__).parents[2] / "docs/what-you-have.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (test_\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
#: Most lines of an example; its name and blank lines are not counted.
MOST = 10
#: Example -> what is changed into what, and what is then said of it.
FAULTS = {
    "test_hook.py": (" / dist.get_world_size(group)", "", "times too large"),
    "test_optimizer.py": ("**settings.arguments", "lr=0.1", "differs from a one-step replay"),
    "test_plan.py": ("mlp.down", "mlp.dwn", "the model has no module 'blocks.*.mlp.dwn'"),
    "test_sampler.py": ("7 * epoch", "7", "epoch 1 has the order of epoch 0"),
    "test_schedule.py": (
        '"""Yours."""',
        "def __init__(self, *given, **more):\n"
        "        super().__init__(*given, **{**more, 'scale_grads': True})",
        "times too small",
    ),
    "test_model.py": ("none", "mean", "return the loss of each target"),
}


def run(folder: Path, name: str, text: str) -> tuple[int, str]:
    (folder / name).write_text(text)
    done = pytest_here("-q", name, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_every_example_has_its_fault() -> None:
    assert EXAMPLES.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_passes(tmp_path: Path, name: str) -> None:
    lines = [line for line in EXAMPLES[name].splitlines() if line.strip()]
    assert len(lines) <= MOST
    code, told = run(tmp_path, name, EXAMPLES[name])
    assert code == 0 and "1 passed" in told, told


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_changed_example_fails(tmp_path: Path, name: str) -> None:
    old, new, says = FAULTS[name]
    assert EXAMPLES[name].count(old) == 1
    code, told = run(tmp_path, name, EXAMPLES[name].replace(old, new))
    assert code == 1 and says in told, told
