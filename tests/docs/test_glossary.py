"""docs/glossary.md lists each word once, in order, and names files and verdicts that exist."""

from __future__ import annotations

import re
from pathlib import Path

from shardproof import verdicts

ROOT = Path(__file__).parents[2]


def test_words_are_in_order_and_files_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = [line.split("|") for line in text.split("## Verdicts")[0].splitlines()]
    words = [row[1].strip().replace("`", "").lower() for row in rows if len(row) > 4][2:]
    assert len(words) > 100
    assert words == sorted(words) and len(words) == len(set(words))
    for name in set(re.findall(r"`((?:suite|impls)/[^`]*)`", text)):
        assert (ROOT / name).exists(), name
    for verdict in verdicts.VERDICTS:
        assert f"| `{verdict}` |" in text


def test_names_are_defined_in_the_files_that_rows_name() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    named = set(re.findall(r"`([\w.]+)` in `((?:suite|impls|tools)/[^`]*\.py)`", text))
    assert len(named) > 15
    for name, file in named:
        last = re.escape(name.split(".")[-1])
        defined = rf"^ *(?:(?:class|def) {last}\b|{last}\b *[:=])"
        assert re.search(defined, (ROOT / file).read_text(), re.MULTILINE), (name, file)
