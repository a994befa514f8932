"""What looks like a pass and is none: ranks that leave, or go on, where nothing is compared."""

from __future__ import annotations

from typing import Any

import pytest
from watched_script import watch

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("forked_ranks")]

APART = """\
torch.manual_seed(rank)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

#: Name -> (what the script does, what the verdict says, the steps that were compared).
SCRIPTS = {
    "it leaves at once": (
        APART + "steps(model, optimizer, 1)\nimport os\nos._exit(0)\n",
        "ranks 0-1 did not reach the end of the script: they left Python at once",
        [],
    ),
    "it goes on in another group": (
        "model = make()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for p in model.parameters():\n    p.grad = torch.ones_like(p)\n"
        "optimizer.step()\ndist.destroy_process_group()\n"
        # Not in env:// again: ranks that are quick find the first store, watched or not, and hang.
        "import sys\ninit_method = f'file://{sys.argv[0]}.second'\n"
        "dist.init_process_group('gloo', init_method, rank=rank, world_size=world)\n"
        "steps(model, optimizer, 5)\n"
        # gloo breaks a rank that is still connecting when another one ends.
        "dist.barrier()\n",
        "not compared: steps after destroy_process_group",
        [1, 1],
    ),
}


@pytest.mark.parametrize(("count", "code"), [(7, 3), (6, 0)])
def test_an_optimizer_that_ends_before_its_last_steps_were_compared_is_no_pass(
    command: Any, tmp_path: Any, count: int, code: int
) -> None:
    """Steps 1 and 6 are compared; a fault in the seventh would leave nothing behind."""
    body = (
        "def train():\n"
        "    model = make()\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"    for step in range({count}):\n"
        "        for p in model.parameters():\n"
        "            p.grad = torch.ones_like(p)\n"
        "        optimizer.step()\n"
        "train()\n"
    )
    found, told, (seen,), report = watch(command, tmp_path, body, "--every", "5")
    assert found == code and seen["compared"] == [1, 6], told
    if code:
        assert report["reason"].startswith(
            "an optimizer ended before its last steps were compared: SGD made 7, and step 6 "
        ), told


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_was_not_compared_is_no_pass(command: Any, tmp_path: Any, name: str) -> None:
    body, says, steps = SCRIPTS[name]
    code, told, (seen,), report = watch(command, tmp_path, body)
    assert code == 3 and report["verdict"] == "undecidable", told
    assert report["reason"].startswith(says), told
    assert seen["compared"] == steps and bool(seen["counts"]) == bool(steps), told
