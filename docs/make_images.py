"""Makes the pictures of the README from real runs.

    python docs/make_images.py matrix RUN          # docs/images/matrix.svg: verdicts of a run
    python docs/make_images.py terminal            # docs/images/caught.svg: a planted fault, caught
    python docs/make_images.py efficiency RUN ...  # docs/images/efficiency.svg: by bandwidth
    python docs/make_images.py badges              # docs/images/badge-*.svg: what the package needs

The matrix has a row for each implementation and a column for each capability; a cell shows the
worst verdict of all backends.  The terminal shows the commands of ``COMMANDS`` with their whole
output; it has no animation, so it is never empty.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from shardproof import registry
from shardproof.init.drawing import COLOURS, badge
from shardproof.report import capability_matrix
from shardproof.report.capability_matrix import STATES, State
from shardproof.runs.run_folder import find_run, read

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
#: What the terminal shows.
COMMANDS = (
    "shardproof run ddp-gpt --impl mutants/ddp_misses_replaced_parameter "
    "--tier full -k 'in_memory and fp64 and replicate3 and sgd and noclip'",
    "shardproof mutants --impl ddp_misses_replaced_parameter",
)
#: Columns of the terminal.
WIDTH = 110
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
SANS = "-apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def svg(width: float, height: float, name: str, body: Sequence[str], style: str) -> str:
    """A whole SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">\n<title>{escape(name)}</title>\n'
        f"<style>{style}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


# ----------------------------------------------------------------------------------------- matrix


def worst(states: Sequence[State]) -> State:
    """The gravest of ``states``; what was not run or skipped counts only where nothing else is."""
    return min(states, key=STATES.index)


def matrix(run: Path) -> str:
    """The verdicts of ``run``."""
    evidence = read(run)
    cells = capability_matrix.cells(evidence.cases, evidence.left_out)
    named = {cell.capability for cell in cells}
    columns = [name for name in capability_matrix.CAPABILITIES if name in named]
    rows = sorted({cell.implementation for cell in cells if "/" in cell.implementation})
    states = {
        (row, column): worst(
            [c.state for c in cells if (c.implementation, c.capability) == (row, column)]
        )
        for row in rows
        for column in columns
        if any((c.implementation, c.capability) == (row, column) for c in cells)
    }
    left, top, size, high = 210, 116, 27, 19
    body = ['<rect width="100%" height="100%" class="paper"/>']
    for number, column in enumerate(columns):
        x = left + number * size + size / 2 + 4
        body.append(
            f'<text transform="translate({x:g} {top - 8}) rotate(-45)">{escape(column)}</text>'
        )
    for line, row in enumerate(rows):
        y = top + line * high
        body.append(f'<text x="{left - 8}" y="{y + 13:g}" text-anchor="end">{escape(row)}</text>')
        for number, column in enumerate(columns):
            if state := states.get((row, column)):
                fill, ink = COLOURS[state]
                x = left + number * size
                mark = {"pass": "\u2713", "fail": "\u2717", "skip": "\u2013"}.get(state, state[0])
                body.append(
                    f"<g><title>{escape(f'{row}, {column}: {state}')}</title>"
                    f'<rect x="{x}" y="{y}" width="{size - 2}" height="{high - 2}" rx="3" '
                    f'fill="{fill}"/>'
                    f'<text x="{x + size / 2 - 1:g}" y="{y + 13:g}" text-anchor="middle" '
                    f'style="fill:{ink}">{mark}</text></g>'
                )
    x, y = left, top + len(rows) * high + 22
    for state in STATES:
        if state in states.values():
            fill, _ = COLOURS[state]
            body.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="3" fill="{fill}"/>')
            body.append(f'<text x="{x + 20}" y="{y}">{escape(state)}</text>')
            x += 40 + 7 * len(state)
    style = (
        f"text{{font:11px {SANS};fill:#24292f}}.paper{{fill:#ffffff}}"
        "@media (prefers-color-scheme:dark){text{fill:#d0d7de}.paper{fill:#0d1117}}"
    )
    name = "Implementations by capability: the worst verdict of all backends"
    return svg(left + len(columns) * size + 70, y + 14, name, body, style)


# --------------------------------------------------------------------------------------- terminal


def record(command: str, folder: Path) -> list[str]:
    """``command`` and the lines that it prints."""
    environment = {
        **{name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": str(WIDTH),
    }
    done = subprocess.run(
        f"{command} --results {folder}",
        shell=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    lines = done.stdout.replace(str(folder), "results/RUN").splitlines()
    # How long this machine took is no part of the story.
    return [f"$ {command}", *(line for line in lines if not re.match(r" +\d+/\d+ in ", line))]


def wrapped(line: str) -> list[str]:
    """``line`` in pieces of ``WIDTH`` columns, broken between words where there are any."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [""]


def kind_of(line: str) -> str:
    """The style of a whole ``line``: its colour must not depend on where it is wrapped."""
    if line.startswith("$ "):
        return "prompt"
    if re.match(r"fail:| +(equivalence|replicas):|\d+ judged \(\d+ fail", line):
        return "bad"
    return "good" if re.search(r"\bkilled\b", line) else ""


def terminal(outputs: Sequence[Sequence[str]]) -> str:
    """The commands and their output, with an empty line after each."""
    shown: list[tuple[str, str]] = []
    for lines in outputs:
        shown += [(kind_of(line), part) for line in lines for part in wrapped(line)]
        shown.append(("", ""))
    high = 17
    body = ['<rect width="100%" height="100%" rx="8" fill="#0d1117"/>']
    for number, (kind, line) in enumerate(shown):
        body.append(
            f'<text class="{kind}" x="14" y="{26 + number * high}" '
            f'xml:space="preserve">{escape(line)}</text>'
        )
    style = (
        f"text{{font:12.5px {FONT};fill:#d0d7de;white-space:pre}}"
        ".prompt{fill:#7ee787;font-weight:600}.bad{fill:#ff9d8a}.good{fill:#7ee787}"
    )
    name = "A terminal: a planted fault is caught; the failure names tensor, step and rank"
    return svg(28 + WIDTH * 7.6, 36 + len(shown) * high, name, body, style)


def recorded() -> str:
    """The terminal with the commands of ``COMMANDS``, run now."""
    with tempfile.TemporaryDirectory() as place:
        return terminal(
            [record(text, Path(place) / str(number)) for number, text in enumerate(COMMANDS)]
        )


# ------------------------------------------------------------------------------------- efficiency


def _marks(x: float, y: float) -> list[str]:
    """The legend of what all panels share; each panel names its own systems."""
    from shardproof.bench.drawings.markers import marker

    shown = (
        (str(marker("circle", x + 6, y - 4, "v-0", 2.8)), "measured, with its 95 % interval"),
        (str(marker("diamond", x + 236, y - 4, "m-modelled", 2.2)), "alpha-beta model"),
        (
            f'<line x1="{x + 396}" y1="{y - 4}" x2="{x + 420}" y2="{y - 4}" class="target"/>',
            "target",
        ),
    )
    places = (x + 16, x + 246, x + 428)
    return [
        f'{mark}<text x="{at}" y="{y}">{text}</text>'
        for (mark, text), at in zip(shown, places, strict=True)
    ]


def efficiency(runs: Sequence[Path]) -> str:
    """Efficiency by the bandwidth between nodes: the panels of the report, side by side."""
    from shardproof.bench import lines
    from shardproof.bench.drawings import by_bandwidth

    panels = by_bandwidth.panels(cell for run in runs for cell in lines.cells(read(run)))
    wide, top = 330, 34
    high = max(float(re.findall(r'viewBox="0 0 330 ([0-9.]+)"', panel)[0]) for _, panel in panels)
    body = ['<rect width="100%" height="100%" fill="var(--paper)"/>']
    for number, (heading, panel) in enumerate(panels):
        x = 14 + number * (wide + 20)
        body.append(f'<text x="{x}" y="24" font-weight="600">{escape(heading)}</text>')
        place = f'<svg x="{x}" y="{top}" width="{wide}" height="{high:g}"'
        body.append(str(panel).replace("<svg", place, 1))
    body += _marks(14, top + high + 14)
    style = (ROOT / "suite/report/templates/report.css").read_text(encoding="utf-8")
    name = "Efficiency of ranks on nodes by the bandwidth between them, beside the model"
    style += f"text{{font:11px {SANS};fill:var(--ink)}}"
    return svg(28 + len(panels) * (wide + 20), top + high + 30, name, body, style)


# ----------------------------------------------------------------------------------------- badges


def badges() -> dict[str, str]:
    """Name of a badge -> its SVG, from what pyproject.toml and the registry say today."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(one for one in project["dependencies"] if one.startswith("torch"))
    told = {
        "license": project["license"],
        "python": project["requires-python"].removeprefix(">=") + " or newer",
        "torch": torch.removeprefix("torch>=").partition(",")[0] + " or newer",
        "faults": f"{len(registry.mutant_names())} planted",
    }
    return {name: badge(name, text, "pass", f"{name}: {text}") for name, text in told.items()}


def main() -> None:
    """Write one picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("picture", choices=("matrix", "terminal", "efficiency", "badges"))
    parser.add_argument("run", nargs="*", help="folders or ids of runs; default: the newest")
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    if options.picture == "matrix":
        (IMAGES / "matrix.svg").write_text(
            matrix(find_run(options.run[0] if options.run else None))
        )
    elif options.picture == "efficiency":
        runs = [find_run(run) for run in options.run or [None]]
        (IMAGES / "efficiency.svg").write_text(efficiency(runs))
    elif options.picture == "badges":
        for name, text in badges().items():
            (IMAGES / f"badge-{name}.svg").write_text(text)
    else:
        (IMAGES / "caught.svg").write_text(recorded())


if __name__ == "__main__":
    main()
