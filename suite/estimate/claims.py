"""Popular sentences about distributed training, put to the test: ``scenarios/claims/``.

A file has a sentence (``about``) and figures: each is computed by a formula, predicted by a
simulation (if a ``machine`` is given), or measured by cases of this suite.  A figure may be
compared with the one that the sentence claims (``claimed``).  If all agree, the sentence is *true*;
if none does, it is *wrong*; otherwise it is *true if* the ``condition`` holds.  ``honest`` is the
right value; any other figure fails the run.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BeforeValidator, Field

from shardproof import axes, strategies
from shardproof.case import Case
from shardproof.costs import shapes
from shardproof.costs.expression import Functions, Grammar, parse
from shardproof.costs.schedules import FORMS
from shardproof.costs.schedules import Setting as Window
from shardproof.costs.shapes import BatchSize, activations
from shardproof.errors import InputError, Problem, ScenarioError, SelectionError, nearest
from shardproof.estimate import figures
from shardproof.estimate.own import strategy_of
from shardproof.scenarios.load import of_node, read_as
from shardproof.scenarios.schema import Model, Scenario, Values
from shardproof.scenarios.source import Node
from shardproof.table import Mark, Table, number
from shardproof.wings import required

#: How far a figure may be from what a sentence says of it.
NEAR = Fraction(1, 20)
_COMPARED = re.compile(r"(<=|>=|<|>)?\s*(.+)\Z")
_SIGNS: Mapping[str, Callable[[Fraction, Fraction], bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "": lambda a, b: abs(a - b) <= NEAR * abs(b),
}
_NOT_RUN = "not run"
#: Groups of verdicts, in the order of the last line.
_WORDS = ("true", "true under a condition", "wrong", "open")
Text = Annotated[str, BeforeValidator(str)]


class Measured(Scenario):
    """Cases that measure it: a scenario without a name."""

    name: str = ""
    about: str = ""
    sees: list[str] = Field([])
    agrees: bool | None = Field(
        None, description="whether cases that pass agree with the sentence; null: neither way"
    )


class FigureModel(Model):
    """A figure of a sentence, by a formula."""

    what: str = Field(description="what it is, and where")
    of: Values = Field(
        {}, description="arguments of estimate, of simulate (with a machine), or schedule"
    )
    against: Values = Field({}, description="a second setting: against.NAME in the formula")
    value: Text = Field(description="a formula: figures of the setting, numbers, + - * / ( )")
    honest: Text = Field(description="the right value, to the digits that are written")
    claimed: Text | None = Field(None, description="what the sentence says: a number, or `<= 80`")


class ClaimFile(Model):
    """A sentence, and what it is worth."""

    claim: Text = Field(description="its number, or the name of a table")
    about: str = Field(min_length=3, description="the sentence")
    honest: str = Field(min_length=3, description="what is right")
    condition: str = Field("", description="under which the sentence is true")
    source: str = Field("", description="who says it")
    needs: str = Field("", description="what it takes to decide it, where that is missing")
    figures: list[FigureModel] = Field([])
    faults: list[str] = Field([], description="planted faults: the sentence taken at its word")
    measured: Measured | None = Field(None, description="cases that measure it")

    @property
    def stated(self) -> str:
        """The verdict by the right values that the file states, in no time: nothing is computed."""
        told = [_agrees(row, Fraction(row.honest)) for row in self.figures]
        told += [self.measured.agrees] if self.measured else []
        return self.verdict([*told, *(False for _ in self.faults)])

    def verdict(self, agree: Sequence[bool | None]) -> str:
        """``true``, ``true if CONDITION`` or ``wrong``, by what figures say of the sentence;
        ``open`` where something is missing.
        """
        told = [one for one in agree if one is not None]
        held = f"true if {self.condition}" if any(told) else "wrong"
        decided = ["true" if all(told) else held] if told else []
        return "; ".join(decided + ([f"open: {self.needs}"] if self.needs else []))


@dataclass(frozen=True)
class Figure:
    """A figure and what comes of it; ``agrees``: ``None`` where the sentence says nothing of it."""

    what: str
    found: str
    honest: str
    claimed: str
    agrees: bool | None
    is_right: bool


@dataclass(frozen=True)
class Claim:
    """A file that was read."""

    file: ClaimFile
    path: str
    node: Node

    def problem(self, keys: Sequence[str | int], what: str, value: str) -> ScenarioError:
        """An error at the line of the part at ``keys``."""
        at = self.node.locate(keys)
        return ScenarioError(Problem(what, "correct it", value, self.path, at))

    @cached_property
    def computed(self) -> list[Figure]:
        """Every figure of a formula; a simulated figure has the value in the file.

        :raises ScenarioError: no formula, or a setting that cannot be.
        """
        return [*self._figures(simulate=False)]

    @cached_property
    def simulated(self) -> list[Figure]:
        """The same, with simulated figures."""
        return [*self._figures(simulate=True)]

    def _figures(self, simulate: bool) -> Iterator[Figure]:
        for place, row in enumerate(self.file.figures):
            if "machine" in row.of and not simulate:
                yield replace(_figure(row, Fraction(row.honest)), found=_NOT_RUN)
                continue
            try:
                facts = facts_of(row.of)
                facts |= {f"against.{k}": v for k, v in facts_of(row.against).items()}
                value = _evaluated(row.value, facts)
            except (InputError, ValueError) as error:
                raise self.problem(["figures", place], str(error), row.what) from None
            yield _figure(row, value)

    def cases(self) -> list[Case]:
        """The cases that measure it, and those of planted faults with their parents."""
        from shardproof.cases.kills import pair
        from shardproof.registry import load_mutant
        from shardproof.scenarios.matrix import expand
        from shardproof.scenarios.vocabulary import installed

        found, name = list[Case](), f"claim-{self.file.claim}"
        if self.file.measured is not None:
            whole: Any = self.node.value
            node, line = whole["measured"], whole["measured"].line
            # Cases need what a scenario has: a name and a purpose.
            given = {"name": name, "about": self.file.about, "sees": "a figure that is another"}
            more = {key: Node(line, value, {}) for key, value in given.items()}
            value = {k: v for k, v in node.value.items() if k != "agrees"} | more
            keys = node.keys | {key: Node(line, key, {}) for key in given}
            found += expand(of_node(Node(line, value, keys), self.path), installed())
        for fault in self.file.faults:
            planted = pair(load_mutant(fault), weigh_all=False)
            line = self.node.locate(["faults", self.file.faults.index(fault)])
            own_case = replace(
                planted.case,
                id=f"{name}::{planted.case.id}",
                source=f"{self.path}:{line}",
                xfail=f"what the sentence says, planted as {fault}",
                xfail_says=(),
            )
            parent = replace(
                planted.parent, id=f"{name}::{planted.parent.id}", source=f"{self.path}:{line}"
            )
            found += [own_case, parent]
        return found

    def all_figures(self, verdicts: Mapping[str, str], simulate: bool = False) -> list[Figure]:
        """Computed figures, and those of cases by what came of them (id -> verdict)."""
        found, own = [*(self.simulated if simulate else self.computed)], dict[str, str]()
        for name, verdict in verdicts.items():
            if name.startswith((f"claim-{self.file.claim}::", f"claim-{self.file.claim}[")):
                own[name] = verdict
        if self.file.measured is not None:
            planted = ("::mutants/", "::parent-")
            told = [v for name, v in own.items() if not any(part in name for part in planted)]
            good = sum(v.startswith("pass") for v in told)
            shown = f"{good} of {len(told)} pass" if told else _NOT_RUN
            agrees = self.file.measured.agrees
            found.append(Figure("measured here", shown, "all pass", "", agrees, good == len(told)))
        for fault in self.file.faults:
            told = [v for name, v in own.items() if f"mutants/{fault}::" in name]
            what = f"the sentence as code, planted as `{fault}`"
            right = told in ([], ["xfail"])
            found.append(Figure(what, ", ".join(told) or _NOT_RUN, "xfail", "", False, right))
        return found

    def verdict(self) -> str:
        """:meth:`ClaimFile.verdict` by computed figures."""
        return self.file.verdict([figure.agrees for figure in self.all_figures({})])


def read(path: Path) -> Claim:
    """The file at ``path``.

    :raises ScenarioError: all its faults.
    """
    file, node = read_as(path, ClaimFile, "claim")
    claim = Claim(file, str(path), node)
    told = [f.agrees for f in claim.computed if f.agrees is not None]
    if any(told) and not all(told) and not file.condition and not file.needs:
        what = "only some figures are true, but no condition is given"
        raise claim.problem(["about"], what, file.claim)
    return claim


def _agrees(row: FigureModel, value: Fraction) -> bool | None:
    """Whether ``value`` is what the sentence claims; ``None``: it claims nothing of this figure."""
    if row.claimed is None:
        return None
    sign, given = _COMPARED.match(row.claimed).groups()  # type: ignore[union-attr]
    return _SIGNS[sign or ""](value, Fraction(given))


def _figure(row: FigureModel, value: Fraction) -> Figure:
    agrees = _agrees(row, value)
    digits = -int(Decimal(row.honest).as_tuple().exponent)
    is_right = abs(value - Fraction(row.honest)) <= Fraction(1, 2 * 10**digits)
    shown = f"{float(value):,.{max(digits, 0)}f}"
    return Figure(row.what, shown, row.honest, row.claimed or "", agrees, is_right)


_FUNCTIONS: Functions = {
    "min": (min, None),
    "max": (max, None),
    "ceil": (lambda values: Fraction(math.ceil(values[0])), 1),
}


def _evaluated(text: str, facts: Mapping[str, Fraction]) -> Fraction:
    def named(name: str) -> Callable[[Any], Fraction] | None:
        return (lambda _: facts[name]) if name in facts else None

    grammar = Grammar(named, lambda: [*facts], _FUNCTIONS)
    return Fraction(parse(text, grammar)(None))


def facts_of(of: Mapping[str, Any]) -> dict[str, Fraction]:
    """The figures of a setting, as a mapping from their names.

    :raises InputError: it cannot be.
    """
    given = dict(of)
    if "machine" in given:
        return dict(_simulated(json.dumps(given)))
    if "schedule" in given:
        name = given.pop("schedule")
        form = shapes.known(name, FORMS, "schedule")
        window = Window(**given)
        bubble, held = form.makespan(window), form.held(window, 0)
        found = {"bubble": bubble / window.ideal, "held": Fraction(held, window.chunks)}
        span = form.span(window)
        return found | {
            "bubble_of_total": bubble / (window.ideal + bubble),
            "span_bubble": span / window.ideal,
        }
    if "model" not in given:
        return {"GB": Fraction(10**9)} | {k: Fraction(str(v)) for k, v in given.items()}
    shape = shapes.model(str(given.pop("model")))
    batch = BatchSize(
        *(given.pop(k, d) for k, d in (("samples", 1), ("positions", 0), ("micro_batches", 1)))
    )
    again, accounting = given.pop("recompute", "none"), given.pop("accounting", "A16")
    options = given.pop("options", {})
    strategy = strategy_of(str(given.pop("impl", strategies.REPLICATION)), options)
    mesh = figures.mesh_of(strategy, given.pop("gpus", None), given.pop("mesh", {}))
    one = figures.of_shape(shape, strategy, mesh, accounting, batch, options, again)
    if given:
        valid = ("model", "impl", "gpus", "mesh", "accounting", "options", "recompute", "samples")
        name = next(iter(given))
        raise SelectionError(Problem("unknown argument of estimate", nearest(name, valid), name))
    sizes = {name.replace(" ", "_"): size for name, size in one.parts() if size is not None}
    found = {name: Fraction(size) for name, size in sizes.items()}
    found |= {"ratio": one.ratio, "elements": Fraction(one.elements), "GB": Fraction(10**9)}
    if one.sent is not None:
        found["sent"] = Fraction(one.sent)
    if shape.layers:
        tokens = batch.samples * (batch.positions or shape.seq)
        parts, split = axes.parts(mesh, "widths"), bool(options.get("sequence_parallel"))
        how = activations.LayerSetting(2, parts, split, again)
        found["layer"] = Fraction(activations.of_layer(shape, batch, how))
        found["sbh"] = Fraction(tokens * shape.hidden)
    return found


@cache
def _simulated(training: str) -> Mapping[str, Fraction]:
    """Figures of ``training``, a mapping as JSON: claims ask for the same several times."""
    from shardproof.commands.console import echo

    given = json.loads(training)
    echo(f"simulating {given.get('model')} on {given.get('mesh')}", err=True)
    return required("simulate", "machine", lambda wing: wing.simulated(given))


def run(paths: Sequence[Path], session: Any, how: Any) -> int:
    """Put the sentences of ``paths`` to the test: compute, run what measures them, print all.

    :raises ScenarioError: a faulty file.
    """
    from shardproof.commands.console import echo, make_console
    from shardproof.commands.execution import run_and_exit
    from shardproof.runs.run_folder import find_run
    from shardproof.runs.run_folder import read as read_run

    claims = sorted((read(path) for path in paths), key=lambda claim: order(claim.file.claim))
    cases, code, verdicts = [case for claim in claims for case in claim.cases()], 0, {}
    # Faults that are triggered by one case share their parent's.
    cases = list({case.id: case for case in cases}.values())
    if cases:
        try:
            run_and_exit(cases, session, how)
        except typer.Exit as end:
            code = end.exit_code
            found = read_run(find_run(None if session.results is None else str(session.results)))
            verdicts = {result.case.id: result.verdict for result in found.cases}
    wrong = [
        f"claim {claim.file.claim}, {one.what}: expected {one.honest}, found {one.found}"
        for claim in claims
        for one in claim.all_figures(verdicts, simulate=not how.dry_run)
        if not one.is_right and not (how.dry_run and one.found == _NOT_RUN)
    ]
    sentences = [claim for claim in claims if claim.file.claim.isdecimal()]
    papers = [claim for claim in claims if not claim.file.claim.isdecimal()]
    for title, some in (("Claims", sentences), ("Tables of papers", papers)):
        if some:
            detailed = how.rows or len(claims) == 1
            shown = table(some, verdicts, detailed, simulate=not how.dry_run)
            make_console().print(shown.titled(title))
    for line in wrong:
        echo(line)
    return code or int(bool(wrong))


def order(name: str) -> tuple[int, str]:
    """The key that sorts claims: numbers first."""
    return (int(name), "") if name.isdecimal() else (10**6, name)


def table(
    claims: Sequence[Claim],
    verdicts: Mapping[str, str],
    detailed: bool = False,
    simulate: bool = False,
) -> Table:
    """One line for each sentence, or (``detailed``) for each of its figures."""
    rows: list[tuple[str, ...]] = []
    marks: list[Mark] = []
    for claim in claims:
        verdict, found = claim.verdict(), claim.all_figures(verdicts, simulate)
        marks.append("good" if verdict == "true" else "changed" if "true" in verdict else "bad")
        rows.append((claim.file.claim, claim.file.about, verdict, claim.file.honest))
        for one in found if detailed else ():
            says = {None: "", True: "agrees", False: "differs"}[one.agrees]
            rows.append(("", one.what, f"{one.claimed} {says}".strip(), one.found))
            marks.append("" if one.is_right else "bad")
    found_of = Counter(_word(claim.verdict()) for claim in claims)
    told = ", ".join(f"{found_of[word]} {word}" for word in _WORDS if found_of[word])
    note = f"{number(len(claims), 'sentence')}: {told}"
    headings = ("claim", "sentence", "verdict", "what is right")
    return Table("Claims", headings, rows, marks, notes=(note,))


def _word(verdict: str) -> str:
    """The group that a verdict is counted in."""
    return "true under a condition" if verdict.startswith("true if") else verdict.split(":")[0]
