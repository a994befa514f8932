"""docs/measured-pairs.md shows the run that is committed next to it, and every pair of the file."""

from __future__ import annotations

from pathlib import Path

from shardproof.bench import lines, sides
from shardproof.commands.verify import verify
from shardproof.runs.run_folder import read
from tools import pairs

ROOT = Path(__file__).parents[2]
RUN = ROOT / "results/evidence/words"


def test_the_page_is_that_of_the_committed_run() -> None:
    text = (ROOT / "docs/measured-pairs.md").read_text(encoding="utf-8")
    shown = text.split(pairs.BEGIN)[1].split(pairs.END)[0]
    assert shown.strip() == pairs.section(read(RUN)).strip()
    assert not verify(RUN).problems


def test_every_pair_was_measured() -> None:
    measured = {line.pair.name: line for line in lines.pairs(read(RUN))}
    assert [*measured] == [pair.name for pair in sides.read(["words"])]
    for name, line in measured.items():
        assert line.figures is not None and isinstance(line.sent, lines.Sent), name
        assert isinstance(line.memory, lines.Memory), name
