"""Generates docs/strategies/*.md and the tables of docs/index.md: one page for each implementation.

    python docs/make_strategies.py            # write the pages
    python docs/make_strategies.py --check    # exit code 1 if a committed page is stale
    python docs/make_strategies.py --measure  # run scenarios/strategies first: docs/strategies.json

Sentences come from ``docs/strategies.yaml``; pictures from docstrings; limits and faults from
declarations; bytes from ``docs/strategies.json`` and ``shardproof estimate``; times from
``results``.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from shardproof import registry, strategies
from shardproof.commands import main as command_line
from shardproof.impls.mutants.declare import Mutant

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/strategies"
INDEX = ROOT / "docs/index.md"
DATA = ROOT / "docs/strategies.yaml"
MEASURED = ROOT / "docs/strategies.json"
SCENARIO = "scenarios/strategies/strategies.yaml"
#: Most planted faults that a page shows.
MOST_FAULTS = 6
HEAD = "<!-- Generated: edit docs/strategies.yaml, then `make generated`. -->\n"
BEGIN, END = (f"<!-- strategies:{word} -->" for word in ("begin", "end"))
OWN = "reference/"
#: Of a command of an estimate that nothing else is said of.
USUAL_MODEL, USUAL_GPUS = "7b", 8
LEGEND = (
    "N ranks (F shards, R replicas, T tensor parts); P, G, O: bytes of parameters, gradients and "
    "optimizer state; m: micro-batches of a rank in a step; L layers, b samples of a micro-batch, "
    "s positions, h hidden size."
)
#: Where times are committed -> size of the model.
TIMES = {
    "results/README.md": "3 M",
    "results/evidence/speed-data-parallel.md": "20 M",
    "results/evidence/speed-model-parallel.md": "20 M",
}


@cache
def entries() -> Mapping[str, Any]:
    """The hand-written part: name of an implementation -> its entry, and ``guide``."""
    found: Mapping[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return found


@cache
def measured() -> Mapping[str, Any]:
    """What the cases of the scenario measured, by implementation and label."""
    found: Mapping[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def names() -> list[str]:
    """Every implementation, the suite's own first, in the order of the data."""
    return [name for name in entries() if name != "guide"]


def file_of(name: str) -> str:
    """``zero1.md`` of ``reference/zero1``, ``pytorch-ddp.md`` of ``pytorch/ddp``."""
    return f"{name.removeprefix(OWN).replace('/', '-')}.md"


def cell(text: str) -> str:
    """``text`` as a cell of a table, with markup escaped."""
    return re.sub(r"([\\|\[\]<>*_])", r"\\\1", " ".join(text.split()))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:], ""]


# ------------------------------------------------------------------------------------ estimates


@cache
def estimate(command: str) -> Mapping[str, Any]:
    """What ``shardproof estimate ... --json`` prints of the first implementation."""
    words = [*shlex.split(command)[1:], "--json"]
    done = CliRunner().invoke(command_line.app, words, catch_exceptions=False)
    if done.exit_code:
        raise ValueError(f"{command}: {done.output}")
    found: Mapping[str, Any] = json.loads(done.output)["tables"][0]["rows"][0]
    mesh = ast.literal_eval(str(found["mesh"]))
    return {**{key: None if value == "" else value for key, value in found.items()}, "mesh": mesh}


def estimate_command(entry: Mapping[str, Any]) -> str:
    """The command that shows the usual model under an implementation."""
    words = f"shardproof estimate {USUAL_MODEL} --impl {entry['estimate']} --gpus {USUAL_GPUS}"
    return f"{words} {entry.get('estimate_more', '')}".strip()


def gb(size: float | None) -> str:
    """Bytes in GB, or a dash."""
    return "-" if size is None else f"{size / 1e9:.1f} GB"


# ------------------------------------------------------------------------------------- measured


def measure() -> None:
    """Run the scenario and keep what its cases measured."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["run", SCENARIO, "--tier", "full", "--results", str(run)]
        done = CliRunner().invoke(command_line.app, words, catch_exceptions=False)
        print(done.output)
        keep([run])


def keep(runs: Sequence[Path]) -> None:
    """Write what cases in run folders measured."""
    lines = [line for run in runs for line in (run / "cases.jsonl").read_text().splitlines()]
    found = dict(filter(None, map(_kept, map(json.loads, lines))))
    text = json.dumps(found, indent=1, sort_keys=True)
    MEASURED.write_text(f"{text}\n", encoding="utf-8")


def _kept(line: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    if line["kind"] != "case" or not line["verdict"].startswith("pass"):
        return None
    case = line["case"]
    figures = {one["check"]: one["figures"] for one in line["checks"]}
    memory, traffic = figures.get("memory", {}), figures.get("traffic", {})
    label = f"+{case['label']}" if case["label"] else ""
    return f"{case['implementation']}{label}", {
        "case": line["id"],
        "world": math.prod(case["mesh"].values()),
        "lane": case["dtype"],
        "held": memory.get("bytes_held"),
        "promised": memory.get("bytes_promised"),
        "whole": memory.get("bytes_whole"),
        "sent": _number(traffic.get("bytes_sent")),
        "expected": _number(traffic.get("bytes_expected")),
    }


def _number(text: Any) -> int | None:
    return None if text is None or not str(text).isdigit() else int(text)


# -------------------------------------------------------------------------------------- a page


def page(name: str, faults: Sequence[Mutant]) -> str:
    """The whole page of one implementation."""
    entry = entries()[name]
    own = "of" not in entry
    parts: list[Iterable[str]] = [_head(name, entry), _picture(name, entry), _use(name, entry)]
    parts += [_costs(name, entry), _speed(name)]
    if own:
        parts.append(_when(entry))
    parts += [_limits(name, entry), _faults(name, entry, faults)]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def _head(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    yield HEAD + f"# {entry['title']}"
    yield ""
    twin = entry.get("of")
    yield f"This page says what `{name}` does, what it costs, and when to use it."
    yield ""
    yield f"**Best for:** {entry['best']}."
    yield ""
    if twin:
        also = f"[{entries()[twin]['title']}]({file_of(twin)})"
        if name == "plain":
            yield f"One process trains the whole model. {also} splits its batch over ranks."
        else:
            yield f"It is compared with the strategy {also}, whose page says when to use it."
    else:
        yield " ".join(entry["problem"].split())
    yield ""


def _source(name: str) -> Path:
    return Path(str(sys.modules[registry.load(name).__module__].__file__)).resolve()


def _picture(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """The first two drawings of the docstring: what lies where, and a step."""
    source = ROOT / entry["picture"] if "picture" in entry else _source(name)
    blocks = drawings(ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "")
    if blocks:
        yield from ("```text", "\n\n".join(blocks[:2]), "```", "")


def drawings(docstring: str) -> list[str]:
    """The indented blocks of a docstring that are pictures: two lines and more."""
    blocks: list[list[str]] = [[]]
    for line in docstring.splitlines():
        if line.startswith("    "):
            blocks[-1].append(line[4:])
        elif blocks[-1]:
            blocks.append([])
    return ["\n".join(block) for block in blocks if len(block) > 1]


def _call(function: str, arguments: str) -> list[str]:
    """A call within the width of ruff, which formats code in Markdown too."""
    line = f"{function}({arguments})"
    return [line] if len(line) <= 100 else [f"{function}(", f"    {arguments}", ")"]


def snippet(entry: Mapping[str, Any]) -> str:
    """Five lines that train a model with the strategy."""
    ranks = f", ranks={entry['ranks']}" if "ranks" in entry else ""
    more = f", {entry['arguments']}" if "arguments" in entry else ""
    return "\n".join(
        [
            "from shardproof import Training",
            "",
            f"training = Training(model, loss, data{more})",
            *_call('training.optimizer("adamw", lr=3e-4).strategy', entry["training"]),
            f"result = training.run(steps=100{ranks})",
        ]
    )


def case_command(entry: Mapping[str, Any]) -> str:
    """The command that repeats the measured case of a page."""
    words = entry["case"].replace("+", " and ")
    return f"shardproof run strategies --tier full -k '{words}'"


def _use(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    yield "## Use it"
    yield ""
    if "training" in entry:
        yield from ("```python", snippet(entry), "```", "")
        yield "[Train your own model](../tutorial-train.md) defines `model`, `loss` and `data`."
        if entry.get("wrap"):
            given = ", ".join(filter(None, (entry["training"], entry.get("arguments"))))
            yield f"In your own loop: `wrapped = shardproof.wrap(model, {given})`."
        yield ""
    console = entry.get("console") or ("case" in entry and case_command(entry))
    if console:
        sizes = [estimate_command(entry)] if "estimate" in entry else []
        yield "Test it" + ", and estimate a 7B model:" * bool(sizes) + ":" * (not sizes)
        yield from ("", *(f"    {line}" for line in (console, *sizes)), "")
    elif "own" in entry:
        part = entry["own"]
        yield f"[Test your own part](../what-you-have.md) shows how to test your own {part}."
        yield ""
    elif name.startswith("ecosystem/"):
        scenario = next(p.stem for p in _scenarios() if name in p.read_text(encoding="utf-8"))
        yield "After [installing it](../install-extras.md), this command tests it:"
        path = f"scenarios/ecosystem/{scenario}.yaml"
        yield from ("", f"    shardproof run {path} --tier full -k '{name}'", "")
    source = _source(name).relative_to(ROOT)
    yield f"[Options](../options.md), source: [`{source}`](../../{source})."
    yield ""


def _scenarios() -> list[Path]:
    return sorted((ROOT / "scenarios/ecosystem").glob("*.yaml"))


def _costs(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    if "memory" not in entry and "case" not in entry:
        return
    yield "## Memory, communication, computation"
    yield ""
    keys = [entry[key] for key in ("case",) if key in entry] + entry.get("more_cases", [])
    mine = "memory" in entry
    whole = estimate(estimate_command(entry)) if "estimate" in entry else {}
    rows = []
    for kind, word in (("memory", "held"), ("sent", "sent in a step")):
        formula = cell(entry[kind]) if mine else f"see {link(entry['of'])}"
        size = gb(whole.get({"memory": "state"}.get(kind, kind)))
        shown = [_bytes(measured()[key], kind) for key in keys] or [("-", "-")]
        rows.append((word, formula, *shown[0], size))
        for key, figures in zip(keys[1:], shown[1:], strict=False):
            label = key.partition("+")[2]
            own = entry.get(f"more_{kind}", {}).get(label, "")
            rows.append((f"{word}, {label}", own, *figures, ""))
    if mine:
        rows.append(("computed", " ".join(entry["computation"].split()), "", "", ""))
    kept = [at for at in range(5) if at < 2 or any(row[at] not in ("", "-") for row in rows)]
    head = ("on one rank", "formula", "bytes by the formula", "measured", "7B on 8 GPUs")
    yield from table([head[at] for at in kept], [[row[at] for at in kept] for row in rows])
    if keys:
        yield from (_example(measured()[keys[0]]), "")
    if whole and not mine:
        yield from (f"The formula: {' '.join(whole['source'].split())}.", "")
    if mine:
        yield from (LEGEND, "")


def _example(one: Mapping[str, Any]) -> str:
    """What was measured, in a sentence."""
    precision = {"float64": "fp64", "float32": "fp32"}[one["lane"]]
    whole = f" A whole copy holds {one['whole']:,} bytes." if one["whole"] else ""
    return (
        f"Measured: a GPT of 59,712 parameters on {one['world']} ranks, {precision}, AdamW, 4 "
        f"micro-batches a rank, case `{one['case']}`.{whole}"
    )


def _bytes(one: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """Bytes of one rank, by the formula and as measured (held: on the fullest one)."""
    formula, found, parts = ("promised", "held", 1) if kind == "memory" else ("expected", "sent", 0)
    both = (one[formula], one[found])
    first, second = (
        "-" if size is None else f"{size / (parts or one['world']):,.0f}" for size in both
    )
    return first, second


def link(name: str) -> str:
    """A link to the page of an implementation from another one."""
    return f"[{name.removeprefix(OWN)}]({file_of(name)})"


# --------------------------------------------------------------------------------------- times


@cache
def times() -> list[tuple[str, ...]]:
    """Committed comparisons: first side, second side, model, ratio, verdict, peak, file."""
    found: list[tuple[str, ...]] = []
    for file, size in TIMES.items():
        head: list[str] = []
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            cells = [one.strip() for one in line.strip("|").split("|")] if line[:1] == "|" else []
            if not cells:
                head = []
            elif not head:
                head = cells
            elif row := _time(dict(zip(head, cells, strict=False)), size, file):
                found.append(row)
    return found


def _time(row: Mapping[str, str], size: str, file: str) -> tuple[str, ...] | None:
    if "pair" in row and "verdict" in row:
        first, _, second = row["pair"].partition(" v ")
        ratio, peak = row["A / B [95 %]"], row.get("peak A / B", "-")
    elif "native peer" in row:
        first, second = row["reference"].replace("`", ""), row["native peer"].replace("`", "")
        ratio, peak = row["reference / native [95 %]"], row["peak"]
    else:
        return None
    return first, second, size, ratio, row["verdict"], peak, file


def _speed(name: str) -> Iterator[str]:
    rows = [row for row in times() if name in re.split(r"[ ,]", row[0]) + re.split(r"[ ,]", row[1])]
    yield "## Speed"
    yield ""
    if not rows:
        eco = _tried(name)
        if eco:
            yield "No committed run compares its speed. These are its verdicts:"
            yield ""
            yield from table(("version", "ranks", "expected", "cases"), eco)
            yield "[Systems that people use](../../results/README.md) has the run."
        else:
            yield "No committed run compares its speed. [Time it](../speed.md) yourself."
        yield ""
        return
    shown = [
        (cell(f"{a} / {b}"), size, cell(ratio), verdict, cell(peak))
        for a, b, size, ratio, verdict, peak, _ in rows
    ]
    head = ("step time", "GPT", "ratio [95 %]", "verdict on the first", "peak memory")
    yield from table(head, shown)
    files = sorted({row[-1] for row in rows})
    places = " and ".join(f"[{Path(file).name}](../../{file})" for file in files)
    machine = "AMD EPYC, 2 cores, 2 to 4 gloo ranks, fp32, AdamW"
    yield f"Above 1 the first is slower. {machine}: {places}."
    yield ""


def _tried(name: str) -> list[tuple[str, ...]]:
    text = (ROOT / "results/README.md").read_text(encoding="utf-8")
    text = text.partition("<!-- ecosystem:begin -->")[2].partition("<!-- ecosystem:end -->")[0]
    rows = [[one.strip() for one in line.strip("|").split("|")] for line in text.splitlines()]
    return [tuple(map(cell, row[1:])) for row in rows if row[0].partition("+")[0] == name]


# ----------------------------------------------------------------- when, limits, planted faults


def _when(entry: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## When to use it", "", "**Take it if:**")
    yield from (f"- {' '.join(one.split())}" for one in entry["use"])
    yield from ("", "**Take something else if:**")
    yield from (f"- {' '.join(one.split())}" for one in entry["avoid"])
    yield ""


def _limits(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## Limits", "")
    yield from (f"- {' '.join(one.split())}" for one in entry.get("limits", ()))
    made = registry.load(name).capabilities({})
    by_reason: dict[str, list[str]] = {}
    for trait, reason in made.declines.items():
        by_reason.setdefault(reason, []).append(f"`{trait}`")
    for reason, traits in by_reason.items():
        yield f"- Declined: {', '.join(traits)} (`{reason.replace('`', '')}`)"
    axes = ", ".join(f"`{axis}`" for axis in _axes(name, made.axes))
    saves = ", ".join(f"`{one}`" for one in made.checkpoints) or "none"
    yield f"- Mesh axes: {axes}. Checkpoint formats: {saves}."
    yield ""


def _axes(name: str, declared: Sequence[str]) -> Sequence[str]:
    record = strategies.of(registry.load(name).strategy)
    return sorted({*declared, *(record.axes if name.startswith(OWN) else ())})


def _faults(name: str, entry: Mapping[str, Any], faults: Sequence[Mutant]) -> Iterator[str]:
    own = [fault for fault in faults if fault.parent == name]
    yield from ("## Planted faults", "")
    if not own:
        twin = entry.get("of")
        more = f" Those of {link(twin)} break the same strategy." if twin else ""
        yield f"No fault is planted in it.{more}"
        yield ""
        return
    short = name.rpartition("/")[2]
    own.sort(key=lambda fault: (not fault.name.startswith(short), not fault.zoo))
    chosen = own[:MOST_FAULTS]
    yield f"Planted in it, one at a time: {len(own)} ([all](../bug-zoo.md))."
    yield ""
    for fault in chosen:
        killed = ", ".join(fault.killed_by)
        sentence = re.split(r"(?<=[a-z)])\. ", fault.summary)[0]
        yield f"- `{fault.name}`: {cell(sentence)} (killed by {killed})"
    yield ""


# ---------------------------------------------------------------------------------- first pages


def overview(folder: str = "strategies/") -> Iterator[str]:
    """The table of strategies, and the guide."""
    rows = []
    for name in names():
        entry = entries()[name]
        if "of" in entry or "estimate" not in entry:
            continue
        found = estimate(estimate_command(entry))
        size = [gb(found[key]).removesuffix(" GB") for key in ("state", "sent")]
        title = f"[{entry['title']}]({folder}{file_of(name)})"
        rows.append((title, cell(entry["memory"]), cell(entry["sent"]), *size, entry["best"]))
    head = ("strategy", "memory of a rank", "sent in a step", "GB held", "GB sent", "best for")
    yield from table(head, rows)
    yield LEGEND
    yield "GB: a 7B model on 8 GPUs, state that a rank holds and bytes that it sends in a step"
    yield "(with a meeting, for Local SGD and DiLoCo). The page of each strategy has the command."
    yield ""


def guide(folder: str = "strategies/") -> Iterator[str]:
    """Size of the model and number of GPUs -> strategy, with the command that shows it."""
    rows, commands = [], []
    for one in entries()["guide"]:
        command = " ".join(one["command"].split())
        found = estimate(command)
        takes = " or ".join(
            f"[{entries()[name]['title']}]({folder}{file_of(name)})" for name in one["take"]
        )
        world = math.prod(found["mesh"].values())
        example = f"{found['model']} on {world} GPUs: {gb(found['total'])} a GPU, {found['fits']}"
        rows.append((one["model"], str(one["gpus"]), takes, cell(one["why"]), example))
        commands.append(f"    {command}")
    yield from table(("model", "GPUs", "take", "why", "example"), rows)
    yield "The examples are those of these commands, for GPUs of 80 GB:"
    yield from ("", *commands, "")


def first_page() -> str:
    """docs/index.md with the generated tables between their marks."""
    before, _, rest = INDEX.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [BEGIN, "", "## Strategies", "", *overview(), "## Choose a strategy", "", *guide(), END]
    return before + "\n".join(lines) + after


def contents() -> str:
    """docs/strategies/index.md: every page."""
    lines = [HEAD + "# Strategies and systems", ""]
    lines += ["This page links to a page for every implementation.", ""]
    rows: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    for name in names():
        entry = entries()[name]
        shown = f"[{entry['title']}]({file_of(name)})"
        rows["of" in entry].append((shown, f"`{name}`", entry["best"]))
    lines += ["## Strategies of the suite", ""]
    lines += table(("strategy", "name", "best for"), rows[False])
    lines += ["The [first page](../index.md) compares their memory and traffic.", ""]
    lines += ["## Systems that people use", ""]
    lines += table(("system", "name", "best for"), rows[True])
    lines += ["```{toctree}", ":hidden:", *(file_of(name)[:-3] for name in names()), "```"]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Each page and its text."""
    faults = [registry.load_mutant(name) for name in registry.mutant_names()]
    made = {FOLDER / file_of(name): page(name, faults) for name in names()}
    return {**made, FOLDER / "index.md": contents(), INDEX: first_page()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with ``--check`` compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit code 1 if a page is stale")
    parser.add_argument("--measure", action="store_true", help="run the scenario first")
    parser.add_argument("--keep", type=Path, nargs="+", help="take the figures of these runs")
    given = parser.parse_args(arguments)
    if given.measure:
        measure()
    if given.keep:
        keep(given.keep)
    made = pages()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if given.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run `make generated`", file=sys.stderr)
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
