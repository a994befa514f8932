"""How further state follows training: the rules of ``Capabilities.follows``, read and computed.

    "parameter -> 0.9 * was + 0.1 * parameter"    begins as the parameter; an average from then on
    "0 -> was + 1"                                counts the updates
    "0.1 * (1 - step / 10)"                       a schedule; any value before the first step
    "given"                                       what Implementation.given_state computes
    "equal"                                       equal on all ranks, saved, and moved at least once

A rule is text, so that the judge computes it without any code of the system's.  All is computed in
float64, whatever the dtype in which state is held.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Capabilities, Now, OptimizerSpec
from shardproof.costs.expression import FormulaError, Functions, Grammar, parse

#: Begins the names of values that the update of a step uses, after which a field of the spec comes.
SETTING = "optimizer."
SETTINGS = ("lr", "weight_decay", "momentum", "eps")
GIVEN, EQUAL = "given", "equal"
#: Between the first value and what each update makes of the one before.
_ARROW = "->"
#: What formulas are about; the last ones are fields of the optimizer's spec.
_NAMES = ("was", "parameter", "gradient", "step", *SETTINGS)

Tensors = dict[str, Tensor]


def _wide(value: Tensor | float) -> Tensor:
    # Not as_tensor alone: it would round a number to float32 first.
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _each(function: Callable[..., Tensor]) -> Callable[[list[Any]], Tensor]:
    return lambda values: function(*map(_wide, values))


_FUNCTIONS: Functions = {
    "min": (lambda values: reduce(torch.minimum, map(_wide, values)), None),
    "max": (lambda values: reduce(torch.maximum, map(_wide, values)), None),
    **{name: (_each(getattr(torch, name)), 1) for name in ("abs", "sign", "sqrt", "cos")},
    "power": (_each(torch.pow), 2),
}


def _named(shown: str) -> Callable[[Any], Any] | None:
    if shown == "pi":
        return lambda values: _wide(math.pi)
    return (lambda values: values[shown]) if shown in _NAMES else None


#: Numbers are tensors, which divide by zero without raising: what comes of it is no state's value.
_GRAMMAR = Grammar(_named, lambda: [*_NAMES, "pi"], _FUNCTIONS, lambda digits: _wide(float(digits)))


@dataclass(frozen=True)
class StateRule:
    """The rule of ``name``, which may end with ``*``: then there is one for each parameter.

    It may also begin with ``*``: then it is that of every name which ends as it does.
    """

    name: str
    text: str

    @property
    def is_formula(self) -> bool:
        """Whether it is computed from text."""
        return self.text not in (GIVEN, EQUAL)

    @cached_property
    def terms(self) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any]]:
        """The value after set-up (``None``: anything), and after an update.

        :raises FormulaError: the text is no formula.
        """
        first, arrow, then = self.text.rpartition(_ARROW)
        return (parse(first, _GRAMMAR) if arrow else None), parse(then, _GRAMMAR)

    def owner(self, name: str) -> str | None:
        """The parameter for which ``name`` stands; empty: none; ``None``: another rule's."""
        before, star, after = self.name.partition("*")
        if not star:
            return "" if name == self.name else None
        if after:
            return "" if name.endswith(after) else None
        return name.removeprefix(before) if name.startswith(before) and name != before else None


def problem(declared: Capabilities) -> str:
    """The problem of the rules that a system declares; empty: none."""
    for name, text in declared.follows.items():
        rule, setting = StateRule(name, text), name.removeprefix(SETTING)
        if "*" in name.removesuffix("*") and (not name.startswith("*") or name.count("*") > 1):
            return f"follows: {name!r} may have one '*', at its beginning or its end"
        if name.startswith(SETTING) and setting not in SETTINGS:
            known = ", ".join(SETTING + one for one in SETTINGS)
            return f"follows: {name!r} is not a setting of updates; valid: {known}"
        if name.startswith(SETTING) and not rule.is_formula:
            return f"follows: {name!r} is {text!r}; write a formula of 'step'"
        if name.startswith(SETTING) and (declared.oracle == "replay" or _alone(declared)):
            return f"follows: {name!r} applies only where all ranks share one update"
        try:
            _ = rule.terms if rule.is_formula else None
        except FormulaError as error:
            return f"follows: {name!r}: {error}"
    return ""


def _alone(declared: Capabilities) -> bool:
    return declared.oracle == "emulated" and declared.emulates == "trajectory"


def is_usable(setting: float) -> bool:
    """Whether an update can use it: a number that is not negative."""
    return 0 <= setting < math.inf


@dataclass(frozen=True)
class Follows:
    """The rules of one system.

    ``optimizer``: the case's.  ``given`` computes what the class's own function does (``None``: no
    such rule can be asked).
    """

    rules: tuple[StateRule, ...] = ()
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    given: Callable[[Now], Mapping[str, Tensor]] | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return bool(self.rules)

    def rule_of(self, name: str) -> tuple[StateRule, str] | None:
        """The rule of state ``name``, and the parameter that it belongs to (empty: none)."""
        found = ((rule, rule.owner(name)) for rule in self.rules)
        return next(((rule, owner) for rule, owner in found if owner is not None), None)

    def settings(self, step: int) -> dict[str, Any]:
        """Fields of the optimizer's spec, as the update of ``step`` uses them."""
        settings = (rule for rule in self.rules if rule.name.startswith(SETTING))
        known = self._known(step)
        return {rule.name.removeprefix(SETTING): float(rule.terms[1](known)) for rule in settings}

    def spec(self, spec: OptimizerSpec, step: int) -> OptimizerSpec:
        """``spec`` with the settings of ``step``."""
        return dataclasses.replace(spec, **self.settings(step))

    def _known(self, step: int) -> dict[str, Any]:
        given = {name: getattr(self.optimizer, name) for name in SETTINGS}
        return {name: _wide(float(value)) for name, value in {"step": step, **given}.items()}

    def unusable(self, steps: int) -> str:
        """Which setting no update can use in one of so many ``steps``; empty: none."""
        for step in range(steps):
            try:
                settings = self.settings(step)
            except KeyError as error:
                return f"follows: a setting of updates is a formula of 'step', not of {error}"
            for name, value in settings.items():
                if not is_usable(value):
                    return f"follows: {SETTING + name!r} is {value:g} in step {step}"
        return ""

    def moved(self, buffers: Iterable[str]) -> list[str]:
        """Which of the model's ``buffers`` are moved after the update."""
        return [name for name in buffers if self.rule_of(name) is not None]

    def values(self, names: Iterable[str], now: Now) -> Tensors:
        """The expected state ``names``, as far as their rules say; in float64."""
        found, asked = {}, [(name, *both) for name in names if (both := self.rule_of(name))]
        if self.given is not None and any(rule.text == GIVEN for _, rule, _ in asked):
            own = self.given(now)
            found = {name: _wide(own[name]) for name, rule, _ in asked if rule.text == GIVEN}
        for name, rule, owner in asked:
            if not rule.is_formula or (term := rule.terms[now.step >= 0]) is None:
                continue
            held = {"was": now.was, "parameter": now.parameters, "gradient": now.gradients}
            keys = {"was": name, "parameter": owner, "gradient": owner}
            values = {k: _wide(of[keys[k]]) for k, of in held.items() if keys[k] in of}
            try:
                found[name] = _wide(term(values | self._known(now.step)))
            except KeyError as error:  # a parameter without a gradient, a counter without parameter
                if error.args[0] not in held:
                    raise
        return found

    @property
    def fed_back(self) -> dict[str, str]:
        """The rules on which training itself depends, whatever the model."""
        return {rule.name: rule.text for rule in self.rules if rule.name.startswith(SETTING)}


#: No further state.
NONE = Follows()


def of_rules(rules: Mapping[str, str], optimizer: OptimizerSpec) -> Follows:
    """The rules of a declaration; those that are ``given`` are not computed."""
    return _kept(tuple(rules.items()), optimizer)


@lru_cache(maxsize=64)
def _kept(rules: tuple[tuple[str, str], ...], optimizer: OptimizerSpec) -> Follows:
    return Follows(tuple(StateRule(name, text) for name, text in rules), optimizer)
