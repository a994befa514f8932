"""Formulas of scenario files: the name of a cost (``ddp.payload_bytes``) or an expression.

Everything is an exact :class:`~fractions.Fraction`, because the gate is equality: shares such as
``(N-1)/N`` of a payload have no exact float for three ranks.  An expression is Python's, of
``+ - * /``, parentheses, decimal numbers, ``min``, ``max``, ``ceil`` and names: each a formula or a
fact (:data:`FACTS`).  Text is parsed, and never evaluated as code.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from shardproof import axes, strategies
from shardproof.costs import CostModel, cost_model_class, memory_ratio
from shardproof.costs.context import Exchange
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, model_facts_of
from shardproof.errors import nearest, shorten

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.workloads import Workload

Number = int | Fraction
Facts = Mapping[str, Number]
Term = Callable[[Facts], Fraction]


def _ranks_along(axis: str) -> Callable[[Case, ModelFacts], Number]:
    return lambda case, facts: case.mesh.get(axis, 1)


#: The symbols of an expression, and what they are of a case.  Bytes are those of one copy of the
#: model, tied tensors once.
FACTS: dict[str, Callable[[Case, ModelFacts], Number]] = {
    "world": lambda case, facts: case.world,
    # Ranks along each axis: 1 if it is absent.
    **{name: _ranks_along(name) for name in axes.names()},
    # Shares of the global batch.
    "data_coordinates": lambda case, facts: case.data_coordinates,
    "steps": lambda case, facts: case.steps,
    # Micro-batches of each data coordinate in a window, which is one call of a schedule.
    "micro_batches": lambda case, facts: case.workload.micro_batches,
    "windows": lambda case, facts: case.workload.windows,
    # Samples in one optimizer step.
    "global_batch": lambda case, facts: case.workload.global_batch,
    # Bytes of one element of the case's dtype.
    "itemsize": lambda case, facts: ITEMSIZE[case.dtype],
    # Of all parameters, of those that are trained, and of those that are not.
    "parameter_bytes": lambda case, facts: sum(t.nbytes for t in facts.parameters),
    "trainable_bytes": lambda case, facts: sum(t.nbytes for t in facts.trainable),
    "trainable_elements": lambda case, facts: sum(t.numel for t in facts.trainable),
    "trainable_tensors": lambda case, facts: len(facts.trainable),
    "frozen_bytes": lambda case, facts: sum(t.nbytes for t in facts.parameters if not t.trainable),
    "float_buffer_bytes": lambda case, facts: facts.float_buffer_bytes,
    "float_buffers": lambda case, facts: sum(b.dtype in ITEMSIZE for b in facts.buffers),
    # 1 if gradients are clipped, else 0.
    "clipped": lambda case, facts: int(facts.clipped),
    # Micro-batches of the data coordinate that has most in one optimizer step.
    "rounds": lambda case, facts: facts.rounds,
}


class CaseFacts(dict[str, Number]):
    """The numbers of a case (name -> value), and the model facts that named formulas are computed
    from.
    """

    def __init__(self, numbers: Mapping[str, Number], model_facts: ModelFacts) -> None:
        super().__init__(numbers)
        self.model_facts = model_facts

    def routed_as(self, steps: Iterable[Iterable[Mapping[str, Any]]]) -> CaseFacts:
        """The same with the routing of the oracle: by step and data coordinate, layer -> tensor of
        choices by micro-batch, position and expert.
        """
        facts = self.model_facts
        exchange = Exchange.of(facts) if facts.parts("positions") > 1 else Exchange(facts)

        def counted(place: int, choices: Any) -> tuple[int, ...]:
            lengths = (choices[:, :, 0] >= 0).sum(1).tolist()
            own = [m[exchange.held(place, n)].sum(0) for m, n in zip(choices, lengths, strict=True)]
            return (*sum(own).tolist(),)

        ranks = range(exchange.ranks)
        routed = tuple(
            tuple({n: counted(r, t) for n, t in own.items()} for own in step for r in ranks)
            for step in steps
        )
        return CaseFacts(self, replace(facts, routed=routed))


#: Characters of an expression, which bound its depth as well.
MAX_TEXT = 500
_FOREIGN = re.compile(r"[^A-Za-z0-9_.+*/(),\s-]")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_SIGNS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
#: Function -> what it does with its values, and how many it takes (``None``: one or more).
Functions = Mapping[str, tuple[Callable[[list[Any]], Any], int | None]]
_FUNCTIONS: Functions = {
    "min": (min, None),
    "max": (max, None),
    "ceil": (lambda values: Fraction(math.ceil(values[0])), 1),
}


@dataclass(frozen=True)
class Grammar:
    """The vocabulary of expressions: names (a name's term; ``None``: unknown), and functions.

    ``number`` reads a decimal number.
    """

    named: Callable[[str], Callable[[Any], Any] | None]
    known: Callable[[], list[str]]
    functions: Functions
    number: Callable[[str], Any] = Fraction


class FormulaError(ValueError):
    """Text that is no formula; ``column`` counts from 1."""

    def __init__(self, text: str, column: int, what: str) -> None:
        self.column = column
        super().__init__(f"column {column} of {shorten(text)!r}: {what}")


def model_facts_in(facts: Facts) -> ModelFacts:
    """The model facts that ``facts`` were taken from.

    :raises KeyError: numbers of no case.
    """
    if not isinstance(facts, CaseFacts):
        raise KeyError("this formula needs the tensor shapes of a case, but no case was given")
    return facts.model_facts


#: What can be asked of every strategy.  Bytes are those sent in one optimizer step, summed over
#: ranks (payload), or held by the rank that holds most, once all state exists.
_QUESTIONS: dict[str, Callable[[CostModel], Number]] = {
    "payload_bytes": lambda cost_model: cost_model.payload(),
    "parameter_bytes": lambda cost_model: cost_model.held("parameters"),
    "master_bytes": lambda cost_model: cost_model.held("masters"),
    "gradient_bytes": lambda cost_model: cost_model.held("gradients"),
    "optimizer_bytes": lambda cost_model: cost_model.held("optimizer_state"),
    # Of parameters, masters, gradients and optimizer together.
    "state_bytes": lambda cost_model: cost_model.total(),
    # Times less than whole copies, same options.
    "memory_ratio": memory_ratio,
}


def formula(name: str) -> Term | None:
    """The formula ``strategy.question``; ``None``: no such strategy, or no such question.

    :raises BrokenStrategy: the package that registers the strategy gives no usable cost model.
    """
    strategy, _, suffix = name.rpartition(".")
    if suffix not in _QUESTIONS or not strategies.of(strategy).is_known:
        return None
    ask, cost_model = _QUESTIONS[suffix], cost_model_class(strategy)
    return lambda facts: Fraction(ask(cost_model(model_facts_in(facts))))


def formulas() -> list[str]:
    """The name of every formula: all questions to all strategies."""
    return [f"{strategy}.{suffix}" for strategy in strategies.names() for suffix in _QUESTIONS]


def evaluate(text: str, facts: Facts) -> Fraction:
    """Exact value of ``text`` (a formula's name or an expression) for ``facts``.

    :raises FormulaError: text outside the grammar, or a division by zero.
    """
    try:
        value: Fraction = parse(text)(facts)
        return value
    except ZeroDivisionError:
        raise FormulaError(text, 1, "division by zero for this case") from None
    except RecursionError:
        raise FormulaError(text, 1, "the formula is nested too deep") from None


def _named(shown: str) -> Term | None:
    """A formula, or a fact of the case.

    :raises ValueError: the package that registers the strategy is broken.
    """
    try:
        if (named := formula(shown)) is not None:
            return named
    except strategies.BrokenStrategy as error:
        raise ValueError(str(error)) from error
    return (lambda facts: Fraction(facts[shown])) if shown in FACTS else None


#: Expressions of scenario files.
OF_COSTS = Grammar(_named, lambda: [*formulas(), *FACTS], _FUNCTIONS)


def parse(text: str, grammar: Grammar = OF_COSTS) -> Callable[[Any], Any]:
    """A function of the facts; names are checked here, so that a typo shows before any run.

    :raises FormulaError: text outside the grammar.
    """
    if len(text) > MAX_TEXT:
        raise FormulaError(text, MAX_TEXT, f"the text is longer than {MAX_TEXT} characters")
    if foreign := _FOREIGN.search(text):
        raise FormulaError(text, foreign.start() + 1, f"unexpected {foreign[0]!r}")
    # Python's parser would end the expression at a line break.
    text = re.sub(r"\s", " ", text.strip())
    try:
        return _term(ast.parse(f"{text}\n", mode="eval").body, text, grammar)
    except SyntaxError as error:
        column = min(error.offset or 1, len(text) + 1)
        what = "unexpected end of text" if column > len(text) else error.msg.partition(".")[0]
        raise FormulaError(text, column, what) from None
    except (RecursionError, MemoryError):
        raise FormulaError(text, 1, "the formula is nested too deep") from None


def _term(node: ast.expr, text: str, grammar: Grammar) -> Callable[[Any], Any]:
    shown, functions = text[node.col_offset : node.end_col_offset], grammar.functions

    def refused(what: str) -> FormulaError:
        return FormulaError(text, node.col_offset + 1, what)

    match node:
        case ast.Constant() if _NUMBER.fullmatch(shown):
            # From the text: through a float 0.1 would not be 1/10.
            value = grammar.number(shown)
            return lambda facts: value
        case ast.UnaryOp(ast.USub(), operand):
            inner = _term(operand, text, grammar)
            return lambda facts: -inner(facts)
        case ast.BinOp(left, sign, right) if type(sign) in _SIGNS:
            one, other = (_term(side, text, grammar) for side in (left, right))
            operation = _SIGNS[type(sign)]
            return lambda facts: operation(one(facts), other(facts))
        case ast.Call(ast.Name(name), given) if name in functions:
            function, arity = functions[name]
            if not given or len(given) != (arity or len(given)):
                raise refused(f"{name} needs {arity or 'at least 1'} value")
            arguments = [_term(argument, text, grammar) for argument in given]
            return lambda facts: function([argument(facts) for argument in arguments])
        case ast.Name() | ast.Attribute():
            try:
                named = grammar.named(shown)
            except ValueError as error:
                raise refused(str(error)) from error
            if named is not None:
                return named
            raise refused(
                f"unknown name {shown!r}, {nearest(shown, [*grammar.known(), *functions])}"
            )
    raise refused(f"unexpected {shown!r}")


def facts_of(case: Case, workload: Workload | None = None) -> CaseFacts:
    """The facts of ``case``: shapes of the ``workload`` it trains, and sizes of its mesh."""
    from shardproof import workloads

    workload = workload or workloads.for_case(case)
    model_facts = model_facts_of(case, workload, workload.skeleton)
    return CaseFacts({name: of(case, model_facts) for name, of in FACTS.items()}, model_facts)
