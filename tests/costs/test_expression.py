"""Formulas are exact, closed, and never code."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.costs import NoCostModel, cost_model_class
from shardproof.costs.expression import (
    FACTS,
    FormulaError,
    evaluate,
    facts_of,
    formula,
    formulas,
    parse,
)
from shardproof.costs.families import FAMILIES

NUMBERS = {name: number for number, name in enumerate(FACTS, 1)}


def case(workload: WorkloadSpec, world: int) -> Case:
    return made_case("plain", {"replicate": world}, workload=workload)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2 - 3 - 4", -5),
        ("12 / 3 / 2", 2),
        ("-2 * -3", 6),
        ("- - 2", 2),
        ("1 / 3", Fraction(1, 3)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("min(3, 1, 2) + max(4, 5)", 6),
        ("ceil(7 / 2)", 4),
        ("ceil(-7 / 2)", -3),
        ("world", NUMBERS["world"]),
        (" trainable_bytes /\n world ", Fraction(NUMBERS["trainable_bytes"], NUMBERS["world"])),
    ],
)
def test_values_are_exact(text: str, value: Fraction) -> None:
    assert evaluate(text, NUMBERS) == value


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("1 +", 4, "end of text"),
        ("", 1, "end of text"),
        ("1 + * 2", 5, "invalid syntax"),
        ("(1 + 2", 1, "never closed"),
        ("1 2", 3, "invalid syntax"),
        ("1 $ 2", 3, "unexpected '$'"),
        ("2 ** 3", 1, "unexpected '2 ** 3'"),
        ("wrold * 2", 1, "did you mean world?"),
        ("ddp.payload_byte", 1, "did you mean ddp.payload_bytes?"),
        ("ceil(1, 2)", 1, "ceil needs 1 value"),
        ("min()", 1, "min needs at least 1 value"),
        ("__import__('os')", 1, "unknown name"),
        ("world.__class__", 1, "unknown name"),
        ("1e9", 1, "unexpected '1e9'"),
        ("min(*world)", 5, "unexpected '*world'"),
        ("1)+(2", 2, "unmatched"),
        ("(" * 240 + "1" + ")" * 240, 201, "nested"),
        ("1" * 501, 500, "longer than"),
    ],
)
def test_errors_point_at_the_column(text: str, column: int, says: str) -> None:
    with pytest.raises(FormulaError) as error:
        parse(text)
    if "__import__" not in text:
        assert error.value.column == column
    assert says in str(error.value) or "__import__" in text


def test_division_by_zero_is_a_formula_error() -> None:
    with pytest.raises(FormulaError, match="division by zero"):
        evaluate("1 / (world - 3)", {"world": 3})


@given(st.text(alphabet="0123456789.+-*/(), abworldminxceil_", max_size=60))
def test_any_text_is_a_formula_or_a_formula_error(text: str) -> None:
    try:
        assert isinstance(evaluate(text, NUMBERS), Fraction)
    except FormulaError as error:
        assert 1 <= error.column <= len(text) + 1


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 10**9)), max_size=12))
def test_integer_arithmetic_agrees_with_python(terms: list[tuple[str, int]]) -> None:
    text = "7" + "".join(f" {sign} {number}" for sign, number in terms)
    value = 7
    products = [[7]]
    signs = ["+"]
    for sign, number in terms:
        if sign == "*":
            products[-1].append(number)
        else:
            signs.append(sign)
            products.append([number])
    value = sum(
        (1 if sign == "+" else -1) * math.prod(factors)
        for sign, factors in zip(signs, products, strict=True)
    )
    assert evaluate(text, {}) == value


def test_every_formula_has_a_source_and_needs_the_case_only() -> None:
    facts = facts_of(case(WorkloadSpec("charnames_gpt"), 3))
    assert len(formulas()) == len({*formulas()}) > 150
    for name in formulas():
        found = formula(name)
        assert found is not None
        assert cost_model_class(name.rpartition(".")[0]).source
        with suppress(NoCostModel):  # DeepSpeed's, with its default options
            assert found(facts) >= 0


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ddp_moves_two_copies_a_rank_but_one(world: int) -> None:
    facts = facts_of(case(WorkloadSpec("charnames_gpt"), world))
    trainable = facts["trainable_bytes"]
    assert evaluate("ddp.payload_bytes", facts) == 2 * (world - 1) * trainable
    per_rank = evaluate("ddp.payload_bytes / world", facts)
    assert per_rank == Fraction(2 * (world - 1), world) * trainable
    assert evaluate("single.payload_bytes", facts) == 0


def test_buffers_cost_a_broadcast() -> None:
    facts = facts_of(case(WorkloadSpec("digits_cnn"), 4))
    assert facts["float_buffer_bytes"] > 0
    extra = evaluate("ddp.payload_bytes - naive_ddp.payload_bytes", facts)
    assert extra == 3 * facts["float_buffer_bytes"]


def test_facts_are_the_shapes_of_the_model() -> None:
    from shardproof import workloads

    spec = WorkloadSpec("charnames_gpt", traits=("frozen", "tied", "rebound_buffer", "empty"))
    facts = facts_of(case(spec, 2))
    assert set(facts) == set(FACTS)
    workload = workloads.make(spec, "float64")
    state = workload.state()
    trainable = sum(state[name].nbytes for name in workload.trainable_names)
    assert facts["trainable_bytes"] == trainable
    frozen = set(workload.parameter_names) - set(workload.trainable_names)
    assert facts["frozen_bytes"] == sum(state[name].nbytes for name in frozen) > 0
    assert facts["parameter_bytes"] == trainable + facts["frozen_bytes"]
    buffers = [state[name] for name, _ in workload.model("meta").named_buffers()]
    floats = [buffer.nbytes for buffer in buffers if buffer.is_floating_point()]
    assert facts["float_buffer_bytes"] == sum(floats)


def test_a_step_that_trains_the_head_alone_has_the_limit_of_all_layers() -> None:
    late = WorkloadSpec("charnames_gpt", params={"first_step": "head"})
    facts = facts_of(made_case("adopted:Own", {"tensor": 2}, workload=late)).model_facts
    assert not facts.is_reached("blocks.0")
    every = replace(facts, step=1)
    _, most = FAMILIES["tensor"].bytes(facts)
    assert most >= cost_model_class("tensor")(every).payload() > 0
