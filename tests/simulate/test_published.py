"""The page of published measurements: its shapes, its rows, and reasons of what deviates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.by_path import import_module
from shardproof.costs import shapes

ROOT = Path(__file__).parents[2]


page = import_module(str(ROOT / "docs/make_published.py"))
#: What each run would have to find for its rows to be met exactly.
EXACT = {
    "run": {"bytes": [10 * page.GIB, 5 * page.GIB], "ms": [90.0, 100.0], "tokens": [50.0, 40.0]},
    "less": {"bytes": [4 * page.GIB], "ms": [], "tokens": []},
}


def row(unit: str, theirs: float, **more: Any) -> Any:
    return page.Row("source", "what", unit, theirs, "run", **more)


def test_the_shapes_have_the_parameters_that_were_published() -> None:
    """llm-foundry's README counts MPT exactly; Llama-3.2 3B is that of its checkpoint."""
    published = {"MPT-7B": 6_658_859_008, "MPT-70B": 64_862_437_376, "Llama-3.2 3B": 3_212_749_824,
                 "Llama-3 8B": 8_030_261_248}  # fmt: skip
    for name, count in published.items():
        assert sum(one.numel for one in shapes.tensors(page.SHAPES[name], "")) == count, name


def test_a_figure_is_that_of_a_rank_or_a_difference() -> None:
    assert row("GiB", 8.0).ours(EXACT) == [10.0]
    assert row("GiB", 8.0, place=1).ours(EXACT) == [5.0]
    assert row("GiB", 8.0, less="less").ours(EXACT) == [6.0]
    assert row("GiB", 8.0, less="less").deviations(EXACT) == [-0.25]
    assert row("ms", 100.0).ours(EXACT) == [90.0, 100.0]
    assert row("tokens/s", 100.0).ours(EXACT) == [50.0, 40.0]
    assert row("fits", 11.0).ours(EXACT) == [10 * 2**30 / 1e9]


def test_what_deviates_needs_a_reason() -> None:
    """5 % of memory, 25 % of time, and what fits does not need more than there is."""
    assert not row("GiB", 10.4).needs_reason(EXACT) and row("GiB", 10.6).needs_reason(EXACT)
    assert not row("ms", 119.0).needs_reason(EXACT) and row("ms", 121.0).needs_reason(EXACT)
    assert not row("fits", 10.8).needs_reason(EXACT) and row("fits", 10.7).needs_reason(EXACT)
    told = page.table([row("GiB", 10.6, reason="because")], EXACT)
    assert told.splitlines()[2] == "| source | what | 10.60 | 10.00 | -5.7 % | because |"
    with pytest.raises(ValueError, match=r"source, what \(GiB\) deviates without a reason"):
        page.table([row("GiB", 10.6)], EXACT)
    # A reason is printed only where it is needed.
    assert page.table([row("GiB", 10.4, reason="because")], EXACT).endswith("| -3.8 % |  |")


def test_every_run_has_a_row_and_every_row_a_run() -> None:
    named = {name for one in page.ROWS for name in (one.run, one.less) if name}
    assert named == {*page.RUNS}
    assert all(one.place < len(page.RUNS[one.run].ranks) for one in page.ROWS)
    shown = page.PAGE.read_text()
    for one in page.ROWS:
        assert f"| {one.source} | {one.what} |" in shown, "run docs/make_published.py"


def test_the_page_keeps_what_is_around_a_table() -> None:
    text = "before <!-- a:begin -->\nold\n<!-- a:end --> behind"
    put = page.put(text, "a", "new")
    assert put == "before <!-- a:begin -->\n\nnew\n\n<!-- a:end --> behind"
    assert page.put(put, "a", "new") == put


def test_runs_of_another_configuration_are_not_kept(tmp_path: Path) -> None:
    import json

    name = next(iter(page.RUNS))
    file = tmp_path / "kept.json"
    assert page.kept(None) == page.kept(file) == {}
    for words, count in ((page.RUNS[name].words, 1), ("another", 0)):
        file.write_text(json.dumps({name: {"words": words}}))
        assert len(page.kept(file)) == count


def test_a_run_is_simulated_as_it_says() -> None:
    """Its figures are of the last step, and of both ways to make kernels."""
    small = replace(page.SHAPES["Megatron test"], layers=2, vocab=96, seq=64)
    page.SHAPES["small"] = small
    try:
        run = page.Run("small", "reference/zero1", {"shard": 2}, "h100", 64)
        found = run.found()
    finally:
        del page.SHAPES["small"]
    assert run.words == "reference/zero1, shard 2, M18, batch 1 x 64"
    states = 18 * sum(one.numel for one in shapes.tensors(small, ""))
    assert states / 2 < found["bytes"][0] < 2 * states
    assert found["ms"][0] > found["ms"][1] > 0 and len(found["tokens"]) == 2
