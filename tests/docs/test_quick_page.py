"""``scenarios/conformance/quick.md`` is made of the scenarios as they stand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from shardproof import registry
from shardproof.scenarios.load import find, load_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shrink() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shrink", ROOT / "tools/shrink.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(shrink: ModuleType) -> None:
    made = shrink.page(find([str(shrink.FOLDER)]), json.loads(shrink.SEEN.read_text()))
    assert made == shrink.PAGE.read_text(), "stale: run `make generated`"


def test_every_fault_is_planted_where_its_trigger_is(shrink: ModuleType) -> None:
    """What was seen was planted in quick cases that stand, and that run the parent so."""
    seen = json.loads(shrink.SEEN.read_text())
    standing = {
        case.id: case
        for file in find([str(shrink.FOLDER)])
        for case in shrink.quick_cases(file, None)
    }
    planted = [
        (name, case) for cases in seen.values() for case, names in cases.items() for name in names
    ]
    assert len(planted) == len({name for name, _ in planted}) > 150
    for name, case in planted:
        assert shrink.fits(registry.load_mutant(name), standing[case]), (name, case)


def test_sizes_start_with_the_cheapest_and_keep_the_width_of_a_file(shrink: ModuleType) -> None:
    (file,) = find(["tensor"])
    own = file.scenario.workload
    tried = list(shrink.sizes(file))
    assert tried[:2] == [
        {"params": {"layers": 1, "seq": 8}, "steps": 2},
        {"params": {"layers": 1, "seq": 8}},
    ]
    assert len(tried) == 2 * 3 * own.params["layers"]
    assert all("width" not in size["params"] for size in tried)


def test_a_file_that_sets_its_steps_keeps_them(shrink: ModuleType) -> None:
    (file,) = find(["ddp-traits"])
    assert not any("steps" in size for size in shrink.sizes(file))


def test_a_size_is_written_before_the_rules_of_the_tier(shrink: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    text = (ROOT / "scenarios/conformance/data/ddp-long.yaml").read_text()
    path.write_text(text)
    shrink.write_size(path, {"global_batch": 12, "params": {"layers": 1}})
    size = load_text(path.read_text()).scenario.quick_size
    assert size is not None and (size.global_batch, size.params) == (12, {"layers": 1})
    assert path.read_text().count("quick_size") == 1
    shrink.write_size(path, {})
    assert load_text(path.read_text()).scenario.quick_size is None
