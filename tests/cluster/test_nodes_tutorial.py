"""docs/tutorial-nodes.md, followed from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest
from tutorial import follow

PAGE = (Path(__file__).parents[2] / "docs/tutorial-nodes.md").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_it_prints_what_it_shows(tmp_path: Path) -> None:
    assert follow(PAGE, tmp_path) >= 3
