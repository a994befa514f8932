"""Formulas of scenario files: the name of a cost (``ddp.payload_bytes``) or an expression.

Everything is an exact :class:`~fractions.Fraction`, because the gate is equality: shares such as
``(N-1)/N`` of a payload have no exact float for three ranks.  The grammar is closed::

    sum     := product (("+" | "-") product)*
    product := unary (("*" | "/") unary)*
    unary   := "-" unary | atom
    atom    := number | name | ("min" | "max" | "ceil") "(" sum ("," sum)* ")" | "(" sum ")"

A name is a formula or a fact (:data:`FACTS`).  Text is parsed by hand and never evaluated as code.
"""

from __future__ import annotations

import math
import operator
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from shardproof.case import AXES
from shardproof.costs import COST_MODELS, CostModel, memory_ratio
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, model_facts_of
from shardproof.errors import nearest, shorten

if TYPE_CHECKING:
    from shardproof.case import Case

Number = int | Fraction
Facts = Mapping[str, Number]
Term = Callable[[Facts], Fraction]
Operator = Callable[[Fraction, Fraction], Fraction]

#: The symbols of an expression.  Bytes are those of one copy of the model, tied tensors once.
FACTS: dict[str, str] = {
    "world": "number of ranks",
    "pipe": "ranks along the pipe axis (1 if absent)",
    "replicate": "ranks along the replicate axis (1 if absent)",
    "shard": "ranks along the shard axis (1 if absent)",
    "tensor": "ranks along the tensor axis (1 if absent)",
    "data_coordinates": "shares of the global batch: replicate * shard",
    "steps": "optimizer steps",
    "micro_batches": "micro-batches per data coordinate and window",
    "windows": "schedule calls in one optimizer step",
    "global_batch": "samples in one optimizer step",
    "itemsize": "bytes of one element of the case's dtype",
    "parameter_bytes": "all parameters, frozen ones included",
    "trainable_bytes": "parameters that are trained",
    "trainable_elements": "elements of the parameters that are trained",
    "trainable_tensors": "tensors that are trained",
    "frozen_bytes": "parameters that are not trained",
    "float_buffer_bytes": "floating-point buffers",
    "float_buffers": "number of floating-point buffers",
    "clipped": "1 if gradients are clipped, else 0",
    "rounds": "micro-batches of the data coordinate that has most in one optimizer step",
}


class CaseFacts(dict[str, Number]):
    """The numbers of a case by name, and the model facts that named formulas are computed from."""

    def __init__(self, numbers: Mapping[str, Number], model_facts: ModelFacts) -> None:
        super().__init__(numbers)
        self.model_facts = model_facts


MAX_TEXT = 500
MAX_DEPTH = 32


class FormulaError(ValueError):
    """Text that is no formula; ``column`` counts from 1."""

    def __init__(self, text: str, column: int, what: str) -> None:
        self.column = column
        super().__init__(f"column {column} of {shorten(text)!r}: {what}")


@dataclass(frozen=True)
class Formula:
    """A named cost: what ``value`` counts, in which unit, and where it is published."""

    name: str
    value: Term
    unit: str
    source: str


def model_facts_in(facts: Facts) -> ModelFacts:
    """The model facts that ``facts`` were taken from.

    :raises KeyError: numbers of no case.
    """
    if not isinstance(facts, CaseFacts):
        raise KeyError("these facts come from no case: a strategy's formula needs its shapes")
    return facts.model_facts


Question = Callable[[CostModel], Number]


def _asked(cost_model: type[CostModel], ask: Question) -> Term:
    return lambda facts: Fraction(ask(cost_model(model_facts_in(facts))))


_PER_STEP = "floating-point bytes sent in one optimizer step, summed over ranks"
_PER_RANK = "bytes on the rank that holds most, once all state exists"
#: What can be asked of every strategy: suffix -> (unit, question).
_QUESTIONS: dict[str, tuple[str, Question]] = {
    "payload_bytes": (_PER_STEP, lambda cost_model: cost_model.payload()),
    "parameter_bytes": (_PER_RANK, lambda cost_model: cost_model.held("parameters")),
    "master_bytes": (_PER_RANK, lambda cost_model: cost_model.held("masters")),
    "gradient_bytes": (_PER_RANK, lambda cost_model: cost_model.held("gradients")),
    "optimizer_bytes": (_PER_RANK, lambda cost_model: cost_model.held("optimizer_state")),
    "state_bytes": (f"{_PER_RANK}: parameters, masters, gradients, optimizer", CostModel.total),
    "memory_ratio": ("times less than whole copies, same options", memory_ratio),
}

#: Named formulas: every question to every cost model.
FORMULAS: dict[str, Formula] = {
    f"{strategy}.{suffix}": Formula(
        f"{strategy}.{suffix}", _asked(cost_model, ask), unit, cost_model.source
    )
    for strategy, cost_model in COST_MODELS.items()
    for suffix, (unit, ask) in _QUESTIONS.items()
}


def evaluate(text: str, facts: Facts) -> Fraction:
    """Exact value of ``text`` (a formula's name or an expression) for ``facts``.

    :raises FormulaError: text outside the grammar, or a division by zero.
    """
    try:
        return parse(text)(facts)
    except ZeroDivisionError:
        raise FormulaError(text, 1, "division by zero for this case") from None


def parse(text: str) -> Term:
    """A function of the facts; names are checked here, so that a typo shows before any run."""
    return _Parser(text).parse()


def facts_of(case: Case) -> CaseFacts:
    """The facts of ``case``: shapes of its workload and sizes of its mesh (imports torch)."""
    from shardproof import workloads

    workload = workloads.make(case.workload, case.dtype, case.lane)
    model = workload.model("meta")
    model_facts = model_facts_of(case, workload, model)
    trainable_bytes = sum(t.nbytes for t in model_facts.trainable)
    frozen_bytes = sum(t.nbytes for t in model_facts.parameters if not t.trainable)
    numbers: dict[str, Number] = {
        "world": case.world,
        **{axis: case.mesh.get(axis, 1) for axis in AXES},
        "data_coordinates": case.data_coordinates,
        "steps": case.steps,
        "micro_batches": case.workload.micro_batches,
        "windows": case.workload.windows,
        "global_batch": case.workload.global_batch,
        "itemsize": ITEMSIZE[case.dtype],
        "parameter_bytes": trainable_bytes + frozen_bytes,
        "trainable_bytes": trainable_bytes,
        "trainable_elements": sum(t.numel for t in model_facts.trainable),
        "trainable_tensors": len(model_facts.trainable),
        "frozen_bytes": frozen_bytes,
        "float_buffer_bytes": model_facts.float_buffer_bytes,
        "float_buffers": sum(b.dtype in ITEMSIZE for b in model_facts.buffers),
        "clipped": int(model_facts.clipped),
        "rounds": model_facts.rounds,
    }
    return CaseFacts(numbers, model_facts)


# ----------------------------------------------------------------------------------- the grammar

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)"
    r"|(?P<sign>[-+*/(),]))"
)


#: Function -> what it does with its values, and how many it takes (``None``: one or more).
_FUNCTIONS: dict[str, tuple[Callable[[list[Fraction]], Fraction], int | None]] = {
    "min": (min, None),
    "max": (max, None),
    "ceil": (lambda values: Fraction(math.ceil(values[0])), 1),
}
#: Sign -> how tightly it binds, and what it does.
_SIGNS: dict[str, tuple[int, Operator]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
}


class _Parser:
    """Recursive descent; a token is (kind, text, column)."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_TEXT:
            raise FormulaError(text, MAX_TEXT, f"longer than {MAX_TEXT} characters")
        self.tokens = deque(self._tokens())

    def parse(self) -> Term:
        term = self._sum(0)
        kind, text, column = self.tokens[0]
        if kind != "end":
            raise FormulaError(self.text, column, f"unexpected {text!r}")
        return term

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        position, end = 0, len(self.text.rstrip())
        while position < end:
            match = _TOKEN.match(self.text, position)
            if match is None:
                column = position + len(self.text[position:]) - len(self.text[position:].lstrip())
                raise FormulaError(self.text, column + 1, f"unexpected {self.text[column]!r}")
            kind = str(match.lastgroup)
            yield kind, match[kind], match.start(kind) + 1
            position = match.end()
        yield "end", "end of text", end + 1

    def _take(self, sign: str) -> bool:
        """Whether ``sign`` comes next; then it is passed."""
        if self.tokens[0][1] != sign:
            return False
        self.tokens.popleft()
        return True

    def _expect(self, sign: str) -> None:
        _, given, column = self.tokens[0]
        if not self._take(sign):
            raise FormulaError(self.text, column, f"expected {sign!r}, not {given!r}")

    def _sum(self, depth: int, least: int = 1) -> Term:
        """Operands between signs that bind at least so tightly, put together from the left."""
        term = self._unary(depth)
        while (sign := self.tokens[0][1]) in _SIGNS and _SIGNS[sign][0] >= least:
            self.tokens.popleft()
            binding, operation = _SIGNS[sign]
            term = partial(_combined, operation, term, self._sum(depth, binding + 1))
        return term

    def _unary(self, depth: int) -> Term:
        if depth == MAX_DEPTH:
            raise FormulaError(self.text, self.tokens[0][2], f"nested deeper than {MAX_DEPTH}")
        if self._take("-"):
            inner = self._unary(depth + 1)
            return lambda facts: -inner(facts)
        return self._atom(depth + 1)

    def _atom(self, depth: int) -> Term:
        kind, text, column = self.tokens[0]
        if self._take("("):
            inner = self._sum(depth)
            self._expect(")")
            return inner
        self.tokens.popleft()
        if kind == "number":
            number = Fraction(text)
            return lambda facts: number
        if kind != "name":
            raise FormulaError(self.text, column, f"expected a number, name or '(', not {text!r}")
        if text in _FUNCTIONS:
            return self._call(text, column, depth)
        if text in FORMULAS:
            return FORMULAS[text].value
        if text in FACTS:
            return lambda facts: Fraction(facts[text])
        known = [*FORMULAS, *FACTS, *_FUNCTIONS]
        raise FormulaError(self.text, column, f"unknown name {text!r}, {nearest(text, known)}")

    def _call(self, name: str, column: int, depth: int) -> Term:
        function, arity = _FUNCTIONS[name]
        self._expect("(")
        arguments = [self._sum(depth)]
        while self._take(","):
            arguments.append(self._sum(depth))
        self._expect(")")
        if arity is not None and len(arguments) != arity:
            raise FormulaError(self.text, column, f"{name} takes {arity} value")
        return lambda facts: function([argument(facts) for argument in arguments])


def _combined(operation: Operator, left: Term, right: Term, facts: Facts) -> Fraction:
    return operation(left(facts), right(facts))
