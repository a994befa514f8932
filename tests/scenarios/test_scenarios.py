"""Scenario files: every fault is one clear line; ids are stable; rules must match."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardproof.backends import BACKENDS
from shardproof.case import Case, WorkloadSpec
from shardproof.errors import InputError, ScenarioError, SelectionError
from shardproof.scenarios import source
from shardproof.scenarios.load import SHIPPED, ScenarioFile, find, load, load_text
from shardproof.scenarios.matrix import expand, on_backend, reseed, substitute
from shardproof.scenarios.schema import json_schema
from shardproof.scenarios.select import compile_expression
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import Vocabulary, installed
from shardproof.workloads import TRAITS

GOOD = """\
name: small
about: an example
sees: [nothing]
workload:
  name: gpt
  traits: [tied]
matrix:
  implementation:
    - plain
    - {name: reference/ddp, label: tiny, options: {bucket_bytes: 64}}
  backend: [in_memory, gloo]
  mesh: {replicate: [1, 2]}
  optimizer: [sgd, adamw]
  clip: [null, 0.5]
checks: [equivalence, traffic]
"""


def _fault(spec: WorkloadSpec) -> str | None:
    return f"params: {sorted(spec.params)}" if spec.params else None


WORDS = Vocabulary(
    implementations=("plain", "reference/ddp", "pytorch/ddp"),
    backends=("in_memory", "gloo"),
    workloads=("gpt", "cnn"),
    traits=("tied", "frozen", "unused"),
    checks=("equivalence", "traffic", "memory", "refusals"),
    fault_of=_fault,
)


def cases(text: str) -> list[Case]:
    return expand(load_text(text, "f.yaml"), WORDS)


def refused(text: str, act: Callable[[str], object] = cases) -> str:
    with pytest.raises(ScenarioError) as error:
        act(text)
    return str(error.value)


def test_axes_multiply_and_ids_are_stable() -> None:
    found = cases(GOOD)
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert found[0].id == "small::plain::in_memory::replicate1::sgd::noclip::fp64::quick"
    assert found[-1].id == "small::reference/ddp+tiny::gloo::replicate2::adamw::clip::fp64::quick"
    assert [case.id for case in cases(GOOD)] == [case.id for case in found]
    last = found[-1]
    assert last.options == {"bucket_bytes": 64}
    assert last.optimizer.clip_norm == 0.5
    assert last.workload == WorkloadSpec("gpt", traits=("tied",))
    assert last.world == 2
    assert Case.from_dict(last.to_dict()) == last
    assert [case.source for case in (found[0], last)] == ["f.yaml:9", "f.yaml:10"]


def test_meshes_of_several_axes_and_several_clips_are_named() -> None:
    text = GOOD.replace("{replicate: [1, 2]}", "[{replicate: 2, shard: [1, 3]}, {tensor: 2}]")
    text = text.replace("[null, 0.5]", "[0.5, 2]")
    parts = {(case.id.split("::")[3], case.id.split("::")[5]) for case in cases(text)}
    assert parts == {
        (mesh, clip)
        for mesh in ("replicate2xshard1", "replicate2xshard3", "tensor2")
        for clip in ("clip0.5", "clip2")
    }


def test_a_single_value_stands_for_a_list() -> None:
    text = GOOD.replace("[in_memory, gloo]", "gloo").replace("[sgd, adamw]", "sgd")
    text = text.replace("[null, 0.5]", "null").replace("{replicate: [1, 2]}", "{replicate: 2}")
    assert [case.id for case in cases(text)] == [
        "small::plain::gloo::replicate2::sgd::noclip::fp64::quick",
        "small::reference/ddp+tiny::gloo::replicate2::sgd::noclip::fp64::quick",
    ]


def test_rules_remove_add_and_mark() -> None:
    text = (
        GOOD
        + """\
exclude:
  - {implementation: plain, world: 2, reason: plain is alone}
skip:
  - {label: tiny, backend: gloo, reason: not now}
xfail:
  - {implementation: reference/*, optimizer: adamw, clip: null, reason: known}
include:
  - {implementation: pytorch/ddp, backend: gloo, mesh: {replicate: 5}, clip: null, reason: more}
tier: full
quick:
  - {clip: null, world: [1, 5], optimizer: sgd}
"""
    )
    found = {case.id: case for case in cases(text)}
    assert len(found) == 32 - 8 + 2
    assert not any("plain" in name and "replicate2" in name for name in found)
    skipped = {name for name, case in found.items() if case.skip}
    assert skipped == {name for name in found if "tiny::gloo" in name}
    assert {case.xfail for case in found.values()} == {None, "known"}
    marked = {name for name, case in found.items() if case.xfail}
    assert marked == {name for name in found if "reference/ddp" in name and "adamw::noclip" in name}
    quick = [name for name, case in found.items() if case.tier == "quick"]
    assert quick == [name for name in found if name.endswith("::quick")]
    assert all("::sgd::noclip::" in name for name in quick)
    assert len(quick) == 2 * 2 + 1


SMALLER = """\
tier: full
quick:
  - {clip: null, world: 2}
quick_size: {global_batch: 6, steps: 2, params: {layers: 1}}
"""


def test_quick_cells_train_a_smaller_model_and_the_whole_one_in_tier_full() -> None:
    free = dataclasses.replace(WORDS, fault_of=lambda spec: None)
    usual, smaller = (
        {case.id: case for case in expand(load_text(text, "f.yaml"), free)}
        for text in (GOOD + SMALLER.rpartition("quick_size")[0], GOOD + SMALLER)
    )
    quick = {name for name, case in usual.items() if case.tier == "quick"}
    assert quick == {name for name, case in smaller.items() if case.tier == "quick"} != set()
    for name in quick:
        small, whole = smaller[name], smaller[name.replace("::quick", "::full")]
        assert (small.workload.global_batch, dict(small.workload.params)) == (6, {"layers": 1})
        assert whole.workload == usual[name].workload and whole.tier == "full"
        assert (small.steps, whole.steps) == (2, usual[name].steps) == (2, 3)
    assert len(smaller) == len(usual) + len(quick)


def test_what_a_variant_sets_stays_at_the_quick_size() -> None:
    variants = (
        "  workload:\n"
        "    - {label: deep, global_batch: 20, params: {layers: 4}}\n"
        "    - {label: other, name: cnn}\n"
        "checks:"
    )
    free = dataclasses.replace(WORDS, fault_of=lambda spec: None)
    text = GOOD.replace("checks:", variants) + SMALLER.replace("}}", ", width: 8}}")
    quick = [c for c in expand(load_text(text, "f.yaml"), free) if c.tier == "quick"]
    deep, other = (
        {(c.workload.global_batch, *c.workload.params.items()) for c in quick if label in c.id}
        for label in ("[deep]", "[other]")
    )
    assert deep == {(20, ("layers", 4), ("width", 8))}
    assert other == {(24,)}


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("{params: {layers: 1}}", "f.yaml:19: this workload cannot be built: params: ['layers']"),
        ("{global_batch: 24}", "f.yaml:19: changes no quick case (quick_size)"),
        ("{steps: 3}", "f.yaml:19: changes no quick case (quick_size)"),
        ("{steps: 0}", "f.yaml:19: quick_size.steps"),
        ("{batch: 6}", "f.yaml:19: unknown key quick_size.batch"),
    ],
)
def test_a_quick_size_that_will_not_do_is_told(size: str, says: str) -> None:
    message = refused(GOOD + SMALLER.rpartition("quick_size")[0] + f"quick_size: {size}\n")
    assert says in message, message


def test_the_workload_can_be_an_axis() -> None:
    text = GOOD.replace(
        "checks:",
        "  workload:\n    - {label: odd, traits: [frozen]}\n    - {label: cnn, name: cnn}\nchecks:",
    )
    found = cases(text)
    assert len(found) == 64
    names = {case.id.split("::")[0]: case.workload for case in found}
    assert names == {
        "small[odd]": WorkloadSpec("gpt", traits=("frozen",)),
        "small[cnn]": WorkloadSpec("cnn", traits=("tied",)),
    }


def test_merge_keys_and_aliases_work() -> None:
    text = GOOD.replace("matrix:", "matrix: &m").replace(
        "  optimizer: [sgd, adamw]",
        "  optimizer:\n    - &o {name: sgd, lr: 1e-2}\n    - {<<: *o, label: slow, lr: 1e-3}",
    )
    rates = {case.id.split("::")[4]: case.optimizer.lr for case in cases(text)}
    assert rates == {"sgd": 0.01, "slow": 0.001}


#: what is wrong -> (edit of GOOD, line, what the message says)
FAULTS: dict[str, tuple[str, str, int, str]] = {
    "unknown key": ("about:", "abuot:", 2, "unknown key abuot (abuot) - did you mean about?"),
    "nested unknown key": ("  traits:", "  trais:", 6, "unknown key workload.trais (trais) - did"),
    "unknown option key": ("label: tiny, ", "lable: tiny, ", 10, "did you mean label?"),
    "wrong type": ("[in_memory, gloo]", "[in_memory, 3]", 11, "valid string (3)"),
    "no implicit conversion": (
        "[null, 0.5]",
        "[null, '0.5']",
        14,
        "valid number ('0.5') - write 0.5 without quotes",
    ),
    "boolean is no number": ("[null, 0.5]", "[null, true]", 14, "valid number"),
    "world 0": ("[1, 2]", "[1, 0]", 12, "greater than or equal to 1 (0)"),
    "negative world": ("[1, 2]", "-1", 12, "greater than or equal to 1 (-1)"),
    "unknown axis": ("{replicate:", "{replicat:", 12, "did you mean replicate?"),
    "unknown optimizer": ("[sgd, adamw]", "[sgd, adam]", 13, "did you mean adamw?"),
    "unknown implementation": ("- plain", "- plian", 9, "unknown implementation (plian)"),
    "unknown backend": ("gloo]", "glo]", 11, "unknown backend (glo) - did you mean gloo?"),
    "unknown workload": ("name: gpt", "name: gtp", 5, "unknown workload (gtp)"),
    "unknown trait": ("[tied]", "[tide]", 6, "unknown trait (tide) - did you mean tied?"),
    "unknown check": ("traffic]", "trafic]", 15, "unknown check (trafic) - did you mean traffic?"),
    "workload that does not fit": ("name: gpt", "name: gpt\n  params: {a: 1}", 4, "params: ['a']"),
    "key twice": ("about: an", "name: again\nabout: an", 2, "given twice, first on line 1 (name)"),
    "ambiguous word": ("[null, 0.5]", "off", 14, "this word is ambiguous (off)"),
    "ambiguous key": ("about:", "on:", 2, "this word is ambiguous (on)"),
    "tag": (
        "[null, 0.5]",
        "!!python/object:os.system x",
        14,
        "YAML tags are not allowed (!!python/object:os.system)",
    ),
    "own tag": ("an example", "!include x", 2, "YAML tags are not allowed (!include)"),
    "binary tag": ("an example", "!!binary aGk=", 2, "YAML tags are not allowed (!!binary)"),
    "bad syntax": ("[nothing]", "[nothing", 3, "close the bracket or quote that opens here"),
    "axis outside of matrix": ("about:", "precision: [bfloat16]\nabout:", 2, "move it into matrix"),
    "workload without a key": (
        "  name: gpt\n  traits: [tied]",
        "  gpt",
        4,
        "a mapping ('gpt') - write {name: gpt}",
    ),
    "workloads as a list": (
        "  name: gpt\n  traits: [tied]",
        "  - gpt",
        4,
        "variants, each with a label, belong under matrix.workload",
    ),
    "tab": ("  name: gpt", "\tname: gpt", 5, "spaces, not tabs"),
    "second document": ("sees:", "---\nsees:", 3, "a second YAML document begins"),
    "unknown alias": ("[nothing]", "*nothing", 3, "alias"),
    "missing key": ("about: an example\n", "", 1, "missing key about"),
    "empty list": ("[sgd, adamw]", "[]", 13, "at least 1 item"),
    "options without label": ("label: tiny, ", "", 10, "options need a label"),
    "huge number": ("[1, 2]", "9" * 30, 12, "too many digits"),
    "infinite number": ("0.5", ".inf", 14, "not finite"),
    "number that overflows": ("0.5", "1e999", 14, "not finite"),
    "rate beyond float32": (
        "[sgd, adamw]",
        "{name: sgd, lr: 1e200}",
        13,
        "lr: should be less than",
    ),
    "negative scale of a group": (
        "[sgd, adamw]",
        "{name: sgd, groups: [{pattern: bias, lr_scale: -1e200}]}",
        13,
        "groups[0].lr_scale: should be greater than or equal to 0",
    ),
    "pattern of a group": (
        "[sgd, adamw]",
        "{name: sgd, groups: [{pattern: '('}]}",
        13,
        "groups[0].pattern: not a valid Python regular expression: missing )",
    ),
    "check twice": ("traffic]", "equivalence]", 1, "has the same check twice"),
    "cell twice": ("- plain", "- plain\n    - plain", 7, "two cells are the same"),
    "bad name": ("name: small", "name: Small One", 1, "name: should match pattern"),
    "formula": ("checks:", "expect: {traffic: 2 * wrold}\nchecks:", 15, "did you mean world?"),
    "memory formula": (
        "[equivalence, traffic]\n",
        "[memory]\nexpect: {memory: {state: zero1.state_byte}}\n",
        16,
        "did you mean",
    ),
    "memory of no class": (
        "[equivalence, traffic]\n",
        "[memory]\nexpect: {memory: {optimiser: 12}}\n",
        16,
        "unknown key expect.memory.optimiser",
    ),
    "memory without a figure": (
        "[equivalence, traffic]\n",
        "[memory]\nexpect: {memory: {within: 0.1}}\n",
        16,
        "no expected value given",
    ),
    "memory without its check": (
        "checks:",
        "expect: {memory: {ratio: 4}}\nchecks:",
        15,
        "expect.memory needs the check `memory`",
    ),
    "refusal without check": ("checks:", "expect: {refuses: no}\nchecks:", 16, "ambiguous"),
    "refusal alone": ("checks:", "expect: {refuses: never}\nchecks:", 16, "belong together"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_file_line_value_and_remedy(fault: str) -> None:
    old, new, line, says = FAULTS[fault]
    assert old in GOOD
    text = refused(GOOD.replace(old, new, 1))
    if fault == "refusal without check":
        line = 15
    assert says in text
    assert f"f.yaml:{line}: " in text
    assert " - " in text


@pytest.mark.parametrize("section", ["exclude", "skip", "xfail"])
def test_a_rule_that_matches_nothing_is_an_error(section: str) -> None:
    text = f"{GOOD}{section}:\n  - {{world: 7, reason: no such world}}\n"
    assert "f.yaml:17: " in refused(text)
    assert "matches nothing (no such world)" in refused(text)


def test_rules_need_reasons_and_includes_must_add() -> None:
    assert "missing key exclude[0].reason" in refused(f"{GOOD}exclude:\n  - {{world: 1}}\n")
    assert "adds no cell" in refused(f"{GOOD}include:\n  - {{backend: gloo, reason: again}}\n")
    assert "quick rule matches nothing (backend: ['nccl'])" in refused(
        f"{GOOD}quick:\n  - {{backend: nccl}}\n"
    )
    assert "exclude rules leave no cell" in refused(
        f"{GOOD}exclude:\n  - {{world: [1, 2], reason: all}}\n"
    )


def test_clipping_has_no_place_in_the_bitwise_lane() -> None:
    text = GOOD.replace("checks:", "  lane: bitwise\nchecks:")
    assert "exclude {lane: bitwise" in refused(text)
    text += "exclude:\n  - {lane: bitwise, clip: 0.5, reason: by design}\n"
    assert {case.dtype for case in cases(text)} == {"float32"}


def test_too_many_cells_are_refused_before_they_are_made() -> None:
    sizes = ", ".join(["1"] * 1000)
    text = GOOD.replace("{replicate: [1, 2]}", f"{{replicate: [{sizes}], shard: [{sizes}]}}")
    text = text.replace("[sgd, adamw]", "[sgd]")
    assert "more than 20,000 cells" in refused(text)


def test_all_faults_of_a_file_are_told_at_once() -> None:
    text = refused(GOOD.replace("about:", "abuot:").replace("[null, 0.5]", "[0]"))
    assert "f.yaml:2: unknown key" in text
    assert "f.yaml:14: " in text


# ------------------------------------------------------------------------------------- limits


def test_alias_bomb_is_refused_before_anything_is_built() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    text = refused("\n".join(lines), load_text)
    assert "more than 100,000 YAML nodes with all aliases expanded" in text


def test_limits_of_aliases_depth_and_size() -> None:
    few = "x: &x 1\ny: [" + ", ".join(["*x"] * 100) + "]\n"
    assert len(source.parse(few, "f").plain()["y"]) == 100
    assert "more than 100 aliases" in refused(few + "z: *x\n", load_text)
    assert "nested deeper" in refused("x: " + "[" * 40 + "]" * 40, load_text)
    assert "nested deeper" in refused("x: " + "[" * 900_000, load_text)
    chain = "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [[[[*a{n - 1}]]]]\n" for n in range(1, 20))
    assert "nested deeper" in refused(chain, load_text)
    assert "self-containing alias" in refused("x: &x [*x]", load_text)
    assert "larger than 1 MiB" in refused("#" * (source.MAX_BYTES + 1), load_text)
    wide = "x: [" + "1," * 100_001 + "]"
    assert "more than 100,000 YAML nodes" in refused(wide, load_text)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name: \x00\x01", "binary file"),
        ("name: é".encode("latin-1"), "not UTF-8 text (byte 0xe9 at offset 6)"),
        ("name: x".encode("utf-16"), "binary file"),
        (b"#" * (1 << 20) + b"##", "file is larger than 1 MiB"),
        (b"", "empty file"),
        (b"# only a comment\n", "empty file"),
        (b"- a\n- b\n", "not a mapping (a list)"),
        (b"just text", "not a mapping (just text)"),
        (b"name: \x07", "not valid YAML"),
    ],
)
def test_files_that_are_no_scenario(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as error:
        load(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_missing_files_folders_and_byte_order_marks(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="no such file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(ScenarioError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "marked.yaml").write_text(GOOD, encoding="utf-8-sig")
    assert load(tmp_path / "marked.yaml").name == "small"


def test_one_name_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(GOOD)
    with pytest.raises(ScenarioError, match=r"two.yaml:1: scenario name already used by .*one"):
        find([str(tmp_path)])


def test_scenarios_are_found_by_file_folder_and_name(tmp_path: Path) -> None:
    (tmp_path / "conformance").mkdir()
    (tmp_path / "conformance" / "file.yaml").write_text(GOOD)
    (tmp_path / "other.yaml").write_text(GOOD.replace("name: small", "name: other"))

    def names(*arguments: str) -> list[str]:
        return [file.name for file in find(arguments, tmp_path)]

    assert names() == ["small"]
    assert names("small") == names("file") == names("conformance") == ["small"]
    assert names("other", "small", "other") == ["other", "small"]
    assert names(str(tmp_path)) == ["small", "other"]
    with pytest.raises(SelectionError, match=r"did you mean other\?"):
        names("othr")


def test_shipped_scenarios_are_found_as_pages_name_them_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own files come first."""
    monkeypatch.chdir(tmp_path)
    (one,) = find(["scenarios/conformance/data/ddp-gpt.yaml"])
    assert (one.name, Path(one.file)) == ("ddp-gpt", SHIPPED / "conformance/data/ddp-gpt.yaml")
    assert len(find(["scenarios/conformance"])) > 5
    with pytest.raises(ScenarioError, match=r"scenarios/mine\.yaml"):
        find(["scenarios/mine.yaml"])
    (tmp_path / "scenarios/conformance/data").mkdir(parents=True)
    own = tmp_path / "scenarios/conformance/data/ddp-gpt.yaml"
    own.write_bytes((SHIPPED / "conformance/data/ddp-gpt.yaml").read_bytes())
    (one,) = find(["scenarios/conformance/data/ddp-gpt.yaml"])
    assert Path(tmp_path, one.file) == own


def test_a_folder_that_goes_while_it_is_searched_has_no_scenarios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "stays.yaml").write_text(GOOD)
    sound, gone = os.scandir, [tmp_path / "gone"]

    def scandir(path: Any = ".") -> Any:
        if Path(path) in gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return sound(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [file.name for file in find([str(tmp_path)], tmp_path)] == ["small"]
    gone.append(tmp_path)
    with pytest.raises(SelectionError, match=r"cannot be searched .*: No such file or directory"):
        find([str(tmp_path)], tmp_path)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
)


@settings(max_examples=150)
@given(st.text(max_size=200))
def test_any_text_is_a_scenario_or_a_scenario_error(text: str) -> None:
    with contextlib.suppress(ScenarioError):
        assert isinstance(load_text(text), ScenarioFile)


@settings(max_examples=150)
@given(st.data())
def test_any_edit_of_a_good_file_is_a_scenario_or_a_scenario_error(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(GOOD)))
    stop = data.draw(st.integers(start, min(len(GOOD), start + 20)))
    middle = data.draw(st.text(alphabet="ab:{}[]&*!|>-'\"#%@`, \n\t01.9<", max_size=12))
    with contextlib.suppress(ScenarioError):
        cases(GOOD[:start] + middle + GOOD[stop:])


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_any_bytes_are_a_scenario_or_a_scenario_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with contextlib.suppress(ScenarioError):
        load(path)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(["name", "matrix", "steps", "exclude", "quick"]), SCALARS))
def test_any_value_at_any_key_is_understood_or_refused(values: dict[str, object]) -> None:
    import yaml

    data = yaml.safe_load(GOOD) | values
    with contextlib.suppress(ScenarioError):
        cases(yaml.safe_dump(data))


# ---------------------------------------------------------------------------------- selection

ID = "ddp-gpt[tied]::reference/ddp+small::in_memory::replicate4::sgd::noclip::fp64::quick"


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("", True),
        ("gloo", False),
        ("IN_MEMORY", True),
        ("reference/ddp and replicate4", True),
        ("gloo or sgd", True),
        ("not gloo and not adamw", True),
        ("not (sgd or adamw)", False),
        ("gloo and sgd or fp64", True),
        ("gloo and (sgd or fp64)", False),
        ("not not sgd", True),
        ("ddp-gpt[tied]", True),
        ("::clip::", False),
        ("ddp+small", True),
        (ID, True),
    ],
)
def test_expressions_follow_pytest(expression: str, holds: bool) -> None:
    assert compile_expression(expression)(ID) is holds


@pytest.mark.parametrize(
    ("expression", "column"),
    [("and", 1), ("a b", 3), ("(a", 1), ("a)", 2), ("not", 4), ("a $", 3), ("a or", 5), ("()", 1)],
)
def test_bad_expressions_name_the_column(expression: str, column: int) -> None:
    with pytest.raises(SelectionError, match=f"column {column} "):
        compile_expression(expression)


def test_deep_expressions_are_refused() -> None:
    with pytest.raises(SelectionError, match="nested deeper"):
        compile_expression("not " * 5000 + "a")


@given(st.text(alphabet="ab()[]:/ ornotd\\-+.,$", max_size=40))
def test_any_expression_compiles_or_is_refused(text: str) -> None:
    with contextlib.suppress(SelectionError):
        assert isinstance(compile_expression(text)(ID), bool)


def test_a_system_without_scenario_takes_every_cell_once() -> None:
    found = substitute(cases(GOOD), "mine:DDP")
    assert len(found) == 16
    assert len({case.id for case in found}) == 16
    assert found[0].id == "small::mine:DDP::in_memory::replicate1::sgd::noclip::fp64::quick"
    assert all(case.options == {} and case.implementation == "mine:DDP" for case in found)


def test_another_seed_is_another_case() -> None:
    found = reseed(cases(GOOD), 7)
    assert found[0].id.startswith("small[seed7]::plain::")
    assert {case.workload.seed for case in found} == {7}


# ----------------------------------------------------------------------------------- shipped


def test_the_schema_says_what_the_loader_accepts() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["additionalProperties"] is False
    assert {"name", "about", "sees", "workload", "matrix", "checks"} == set(schema["required"])
    backend = schema["$defs"]["Matrix"]["properties"]["backend"]
    assert {"type": "string", "minLength": 1} in backend["anyOf"]


@pytest.fixture(scope="module")
def shipped() -> list[Case]:
    return [case for file in find([str(SHIPPED)]) for case in expand(file, installed())]


def test_shipped_scenarios_expand_and_stay_within_the_budget(shipped: list[Case]) -> None:
    assert len({case.id for case in shipped}) == len(shipped)
    quick = [case for case in shipped if case.tier == "quick" and "/conformance/" in case.source]
    assert 150 <= len(quick) <= 340  # what `make bench` runs, beside checkpoints
    saved = [case for case in shipped if case.tier == "quick" and "/checkpoint/" in case.source]
    # Two of each of the axes context and expert among them: the same ranks, and others.
    assert 30 <= len(saved) <= 49 and all(case.checkpoint for case in saved)
    own = ("pipeline", "deepspeed-pipeline", "tensor", "hybrid")
    assert sum(case.scenario.startswith(own) for case in quick) <= 45  # a minute on two cores
    assert sum(case.scenario.startswith("compression") for case in quick) <= 14
    assert {case.backend for case in quick} == {"in_memory", "gloo", "mpi"}
    over_mpi = {case.scenario for case in shipped if case.backend == "mpi"}
    assert {name for name in over_mpi if not name.startswith("covering-")} == {
        *("mpi", "faults-data", "faults-pipeline")
    }
    ddp = [case for case in quick if case.implementation in ("reference/ddp", "pytorch/ddp")]
    assert {case.world for case in ddp} == {1, 2, 3, 4, 5}
    assert {case.world for case in shipped if case.implementation == "plain"} <= {1, 2}
    assert all(case.optimizer.clip_norm is None for case in shipped if case.lane == "bitwise")


#: Backends that need GPUs or an MPI, and so are no evidence where there is none.
OPTIONAL = {name for name, b in BACKENDS.items() if b.device == "cuda" or b.mpirun}
#: Scenarios of other steps; the rest of ``conformance`` is the sharded family's.
OTHERS = (
    *(
        "context",
        "expert",
        "deepspeed-ulysses",
        "deepspeed-moe",
        "scale-",
        "simulation",
        "hybrid-context",
        "mixtures",
        "positions",
        "mpi",
        "by-hand",
        "hundred-layers",
        "node-axes",
        "ddp-",
        "faults-",
        "checkpoint-",
        "cluster",
        "covering-",
        "pairs-by-hand",
        "collectives",
        "plain",
        "relations",
        "cuts",
        "late-shares",
        "nccl",
        "gloo-cuda",
        "gpu-",
    ),
    *("backends", "algorithms", "large", "memory-ratios", "bubble", "wide"),
    *("pipeline", "deepspeed-pipeline", "tensor", "hybrid"),
    *("stress-tensor", "stress-pipeline", "stress-mesh"),
    *("samplers", "stopping", "strategies"),
    "compression",
    *("local", "async", "elastic"),
    *("parameter-groups", "own-buffers"),
    *("no-layer-norm", "nested-units", "recurrence", "gradient-penalty", "rotating-shares"),
)


def test_cases_of_the_suite_tell_where_they_stand(shipped: list[Case]) -> None:
    places = {tuple(case.source.rsplit(":", 1)) for case in shipped}
    for file, line in places:
        text = (SHIPPED.parent / file).read_text().splitlines()
        assert file.startswith("scenarios/") and 0 < int(line) <= len(text)


def test_the_sharded_family_fits_into_minutes(shipped: list[Case]) -> None:
    """Counts stand in for seconds, which no test can tell on a machine that does other work.

    The budget is 60 s of quick cases and 8 minutes of all, on two cores at rest: measure both
    before a number here is raised.
    """
    family = [
        case
        for case in shipped
        if not case.scenario.startswith(OTHERS) and "/ecosystem/" not in case.source
    ]
    assert sum(case.tier == "quick" for case in family) <= 62
    assert sum(case.tier == "full" for case in family) <= 820


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp"])
def test_every_sharded_strategy_meets_every_condition(shipped: list[Case], name: str) -> None:
    own = [
        case
        for case in shipped
        if case.implementation == f"reference/{name}"
        and "refuses" not in case.expect
        and case.backend not in OPTIONAL
    ]
    assert {trait for case in own for trait in case.workload.traits} == set(TRAITS)
    assert {case.world for case in own} >= {1, 2, 3, 4, 5}
    assert {case.backend for case in own} == {"in_memory", "gloo"}
    updates = {(case.optimizer.name, case.optimizer.clip_norm is not None) for case in own}
    assert updates == {(name, clipped) for name in ("sgd", "adamw") for clipped in (True, False)}
    assert {case.lane for case in own} == {"fp64", "bitwise", "dyadic", "working_precision"}
    assert {(case.workload.micro_batches, case.workload.windows) for case in own} >= {
        (1, 1),
        (2, 1),
        (3, 1),
        (3, 2),
    }
    assert {case.dtype for case in own} == {"float64", "float32", "bfloat16"}
    policies = {
        tuple(case.precision.get(part) for part in ("parameters", "reduce", "output"))
        for case in own
    }
    assert policies >= {
        (None, None, None),
        ("bfloat16", None, None),
        ("bfloat16", "float32", None),
        ("float16", None, "float32"),
        (None, "bfloat16", None),
    }
    assert any(case.optimizer.scaler for case in own)
    wanted = {"none", "optimizer"} | ({"parameters"} if name in ("zero3", "fsdp") else set())
    assert {case.options.get("offload", "none") for case in own} == wanted
    assert any(case.options.get("recompute_every") for case in own)


def test_fsdp_is_run_in_every_way_of_sharding_and_resting(shipped: list[Case]) -> None:
    own = [
        case
        for case in shipped
        if case.implementation == "reference/fsdp" and "refuses" not in case.expect
    ]
    ways = {
        (c.options.get("sharding_strategy"), c.options.get("reshard_after_forward")) for c in own
    }
    assert ways >= {
        (None, None),
        (None, 2),
        ("NO_SHARD", None),
        ("SHARD_GRAD_OP", None),
        *(("HYBRID_SHARD", rest) for rest in (None, True, False, 2)),
    }
    assert {len(case.options.get("wrap", {})) for case in own} == {0, 1}
    policies = {policy for case in own for policy in case.options.get("wrap", {})}
    assert policies == {"module_class", "minimum_parameters", "units"}
    hybrid = {tuple(c.mesh.values()) for c in own if set(c.mesh) == {"replicate", "shard"}}
    assert hybrid >= {(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)}


def test_suggested_groups_reach_the_optimizer() -> None:
    found = [case for file in find(["ddp-traits"]) for case in expand(file, installed())]
    groups = {case.id.split("::")[0]: case.optimizer.groups for case in found}
    assert groups["ddp-traits[two_groups]"]
    assert not groups["ddp-traits[tied]"]


def test_input_errors_are_value_errors() -> None:
    assert issubclass(InputError, ValueError)


def test_tensor_parallelism_meets_every_condition(shipped: list[Case]) -> None:
    own = [
        case
        for case in shipped
        if case.implementation == "reference/tensor"
        and case.scenario not in ("wide", "scale-axes")
        and "refuses" not in case.expect
        and case.backend not in OPTIONAL
    ]
    assert {trait for case in own for trait in case.workload.traits} == set(TRAITS)
    assert {case.world for case in own} == {1, 2, 3, 4, 5}
    assert {case.backend for case in own} == {"in_memory", "gloo"}
    updates = {(case.optimizer.name, case.optimizer.clip_norm is not None) for case in own}
    assert updates == {(name, clipped) for name in ("sgd", "adamw") for clipped in (True, False)}
    assert {case.lane for case in own} == {"fp64", "bitwise", "dyadic", "working_precision"}
    assert {case.dtype for case in own} == {"float64", "float32", "bfloat16"}
    assert sum(case.tier == "quick" and case.checkpoint is None for case in own) <= 12


def test_mpi_takes_over_the_cells_of_other_backends() -> None:
    """Each cell once; what it has on every other backend, such as a skip, it keeps."""
    files = Selection(scenarios=["ddp-gpt"], tier="full").cases(installed())
    moved = Selection(scenarios=["ddp-gpt"], tier="full", backends=["mpi"]).cases(installed())
    cells = {tuple(c.id.split("::")[i] for i in (0, 1, 3, 4, 5, 6)) for c in files}
    assert {tuple(c.id.split("::")[i] for i in (0, 1, 3, 4, 5, 6)) for c in moved} == cells
    assert {case.backend for case in moved} == {"mpi"} and len({c.id for c in moved}) == len(moved)
    assert any(case.tier == "quick" for case in moved)
    (found,) = Selection(scenarios=[moved[0].id]).cases(installed())
    assert found == moved[0]


def test_a_backend_on_gpus_takes_over_cells_and_keeps_its_own() -> None:
    files = [
        c for name in ("nccl", "ddp-gpt") for c in Selection([name], tier="full").cases(installed())
    ]
    own = [case for case in files if case.backend == "nccl"]
    moved = on_backend(files, "nccl")
    assert moved[: len(own)] == own and len(moved) > len(own)
    assert {case.backend for case in moved} == {"nccl"}
    assert all(case.is_moved for case in moved[len(own) :])
    assert not any(case.is_moved for case in own)
    tried = Selection(["backends"], tier="quick").cases(installed())
    assert on_backend(tried, "mpi") and not on_backend(tried, "nccl")
    chosen = Selection(["ddp-gpt"], tier="quick", backends=["gloo_cuda"]).cases(installed())
    assert chosen and {case.backend for case in chosen} == {"gloo_cuda"}


def test_a_cell_moves_with_the_marks_that_all_backends_share() -> None:
    found = cases(GOOD)
    one = [dataclasses.replace(c, xfail="known") if c.backend == "gloo" else c for c in found]
    assert not any(case.xfail for case in on_backend(one, "mpi"))
    both = [dataclasses.replace(case, skip="not here") for case in found]
    moved = on_backend(both, "mpi")
    assert {case.skip for case in moved} == {"not here"} and 2 * len(moved) == len(found)
