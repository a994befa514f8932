"""What a command that only plans, writes and shows does without."""

from __future__ import annotations

import subprocess
import sys


def test_reports_are_written_without_torch() -> None:
    """Importing torch costs two CPU seconds, in each command that ends with a report."""
    program = "import sys, shardproof.report, shardproof.commands.run; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "scipy", "numpy"} & set(loaded)
