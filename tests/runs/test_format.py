"""The evidence format has a page and a number; another number is refused in words."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import synthetic as made

from shardproof import VERSION
from shardproof.errors import SelectionError
from shardproof.evidence.records import StepRecord
from shardproof.runs import records
from shardproof.runs.header import FORMAT
from shardproof.runs.run_folder import RunFolder

PAGE = (Path(__file__).parents[2] / "docs/evidence.md").read_text()


def of_format(folder: Path, number: Any) -> Path:
    made.write(folder, made.results(2))
    header = json.loads((folder / "run.json").read_text()) | {"format": number}
    (folder / "run.json").write_text(json.dumps(header))
    made.seal(folder)
    return folder


@pytest.mark.parametrize("number", [99, None, "2", 6])
@pytest.mark.parametrize("name", ["verify", "report", "gate", "badges", "bundle", "compare"])
def test_another_format_is_refused_with_the_remedy(
    command: Any, tmp_path: Path, name: str, number: Any
) -> None:
    path = str(of_format(tmp_path / "run", number))
    more = {
        "compare": [path],
        "gate": ["--against", path],
        "badges": ["--output", str(tmp_path / "badges")],
    }
    code, _, err = command(name, path, *more.get(name, []))
    assert code == 2
    assert f"evidence format {number!r}; this version ({VERSION}) reads format {FORMAT}" in err
    assert "repeat the run, or use the version that wrote it" in err
    assert "0123456789abcdef" in err and "Traceback" not in err


def test_a_run_has_one_format(tmp_path: Path) -> None:
    path = of_format(tmp_path / "run", 1)
    with pytest.raises(SelectionError, match="evidence format 1"):
        RunFolder(path, ["shardproof", "run"])


def test_the_page_names_the_format_and_every_field() -> None:
    assert f'`"format": {FORMAT}`' in PAGE
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    for section, columns in records._COLUMNS.items():
        missing = [name for name in columns if f"`{name}`" not in rows[section]]
        assert not missing, f"section {section}: {missing}"
    for field in dataclasses.fields(StepRecord):
        assert f"`{field.name}`" in rows["step"], field.name
    for name in records.ManifestEntry.model_fields:
        assert f"`{name}`" in PAGE
