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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
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
    trainable = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    trainable_bytes = sum(p.nbytes for p in trainable)
    frozen_bytes = sum(p.nbytes for p in frozen)
    model_facts = model_facts_of(case, workload, model)
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
        "trainable_elements": sum(p.numel() for p in trainable),
        "trainable_tensors": len(trainable),
        "frozen_bytes": frozen_bytes,
        "float_buffer_bytes": sum(b.nbytes for b in buffers),
        "float_buffers": len(buffers),
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
_SUMS = {"+": operator.add, "-": operator.sub}
_PRODUCTS = {"*": operator.mul, "/": operator.truediv}


class _Parser:
    """Recursive descent; a token is (kind, text, column)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        if len(text) > MAX_TEXT:
            raise FormulaError(text, MAX_TEXT, f"longer than {MAX_TEXT} characters")
        self.tokens = self._tokens()

    def parse(self) -> Term:
        term = self._sum()
        kind, text, column = self.tokens[self.position]
        if kind != "end":
            raise FormulaError(self.text, column, f"unexpected {text!r}")
        return term

    def _tokens(self) -> list[tuple[str, str, int]]:
        tokens, position = [], 0
        end = len(self.text.rstrip())
        while position < end:
            match = _TOKEN.match(self.text, position)
            if match is None:
                column = position + len(self.text[position:]) - len(self.text[position:].lstrip())
                raise FormulaError(self.text, column + 1, f"unexpected {self.text[column]!r}")
            kind = str(match.lastgroup)
            tokens.append((kind, match[kind], match.start(kind) + 1))
            position = match.end()
        return [*tokens, ("end", "end of text", end + 1)]

    def _take(self, *texts: str) -> str | None:
        kind, text, _ = self.tokens[self.position]
        if kind == "sign" and text in texts:
            self.position += 1
            return text
        return None

    def _expect(self, text: str) -> None:
        if self._take(text) is None:
            _, given, column = self.tokens[self.position]
            raise FormulaError(self.text, column, f"expected {text!r}, not {given!r}")

    def _sum(self) -> Term:
        return self._chain(_SUMS, lambda: self._chain(_PRODUCTS, self._unary))

    def _chain(self, signs: Mapping[str, Operator], operand: Callable[[], Term]) -> Term:
        """Operands between ``signs``, put together from the left."""
        term = operand()
        while sign := self._take(*signs):
            term = _combined(signs[sign], term, operand())
        return term

    def _unary(self) -> Term:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            column = self.tokens[self.position][2]
            raise FormulaError(self.text, column, f"nested deeper than {MAX_DEPTH}")
        try:
            if self._take("-"):
                inner = self._unary()
                return lambda facts: -inner(facts)
            return self._atom()
        finally:
            self.depth -= 1

    def _atom(self) -> Term:
        if self._take("("):
            inner = self._sum()
            self._expect(")")
            return inner
        kind, text, column = self.tokens[self.position]
        self.position += 1
        if kind == "number":
            number = Fraction(text)
            return lambda facts: number
        if kind != "name":
            raise FormulaError(self.text, column, f"expected a number, name or '(', not {text!r}")
        if text in _FUNCTIONS:
            return self._call(text, column)
        if text in FORMULAS:
            return FORMULAS[text].value
        if text in FACTS:
            return lambda facts: Fraction(facts[text])
        known = [*FORMULAS, *FACTS, *_FUNCTIONS]
        raise FormulaError(self.text, column, f"unknown name {text!r}, {nearest(text, known)}")

    def _call(self, name: str, column: int) -> Term:
        function, arity = _FUNCTIONS[name]
        self._expect("(")
        arguments = [self._sum()]
        while self._take(","):
            arguments.append(self._sum())
        self._expect(")")
        if arity is not None and len(arguments) != arity:
            raise FormulaError(self.text, column, f"{name} takes {arity} value")
        return lambda facts: function([argument(facts) for argument in arguments])


def _combined(operation: Operator, left: Term, right: Term) -> Term:
    return lambda facts: operation(left(facts), right(facts))
