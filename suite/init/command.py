"""``shardproof init``: the files with which your repository tests its strategy from now on.

tests/test_shardproof.py           a test with the fixture, which any pytest has
conformance/strategy.yaml          the cases of the gate
conformance/policy.yaml            what breaks it
conformance/baseline.json          what these cases gave here and now
.github/workflows/shardproof.yaml  runs them for every pull request, and the gate
.gitignore                         one more line: runs stay out of the repository
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof import verdicts
from shardproof.backends import USUAL
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError
from shardproof.files import write_whole
from shardproof.init import requirement

if TYPE_CHECKING:
    from shardproof.contract import Options
    from shardproof.launch.pool import Pool

TEST = '''\
"""Splitting the work over ranks changes nothing but the cost."""


def test_strategy(shardproof):
    shardproof("@IMPL@", @MESHES@)
'''
#: The template beside this file, and where it goes.
PLACES = {
    "strategy.yaml": Path("conformance/strategy.yaml"),
    "policy.yaml": Path("conformance/policy.yaml"),
    "workflow.yaml": Path(".github/workflows/shardproof.yaml"),
}
BASELINE = Path("conformance/baseline.json")
IGNORES = Path(".gitignore")
#: The line that it gets, and others that say the same.
RESULTS = "/results/"
_SAME = (RESULTS, "results/", "/results", "results", "**/results/")


def init(
    impl: Annotated[
        str, typer.Argument(metavar="IMPL", help="package.module:Class, or a name of `list impls`")
    ],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="your repository")] = Path(),
    install: Annotated[
        str | None,
        typer.Option(
            "--install",
            metavar="REQ",
            help="requirement that CI installs with pip (default: Shardproof as installed here)",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace existing files")] = False,
    jobs: options.Jobs = None,
) -> None:
    """Write a test, scenario, policy, baseline and workflow for a strategy of your own.

    It adds a line to .gitignore, so that runs (results/) stay out of the repository.

    It runs the scenario once (8 cases, under a minute) and stores the results as the baseline. The
    exit codes are those of `run`. If the exit code is 2 or 130 (Ctrl-C), nothing is written. If no
    case passes (exit code 1 or 3), there is no baseline to store, and only the scenario is written.
    You can then run the scenario again.

    \b
    shardproof init my_package.module:MyStrategy
    """
    from shardproof import registry
    from shardproof.launch.pool import Pool
    from shardproof.registry import preflight

    registry.check(impl)
    with Pool(1) as leaders:
        preflight.check([impl], leaders)
        axes, backends = _abilities(impl, leaders)
    source, note = requirement.default() if install is None else (install, "")
    texts = written(impl, axes, backends, source)
    there = [path for path in (*texts, BASELINE) if _differs(into / path, texts.get(path))]
    if there and not force:
        remedy = "add --force to replace the files, or name another repository by --into"
        problems = [Problem("the file exists", remedy, file=str(into / path)) for path in there]
        raise SelectionError(problems)
    ignores = _ignoring(into / IGNORES)
    with _all_or_none(into, (*texts, BASELINE, *([IGNORES] if ignores else []))):
        for path, text in (*texts.items(), *([(IGNORES, ignores)] if ignores else [])):
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(into / path, text)
        code = _make_baseline(into, jobs)
    for path in (*texts, BASELINE):
        echo(f"wrote {into / path}")
    if ignores:
        echo(f"added {RESULTS} to {into / IGNORES}: runs stay out of the repository")
    if note:
        echo(f"note: {note}", err=True)
    if code:
        echo("the gate breaks until all cases pass; the baseline has some that do not", err=True)
    raise typer.Exit(code)


def _ignoring(path: Path) -> str:
    """The text that ``path`` needs for git to ignore runs; empty: it does already.

    :raises SelectionError: it is no text file.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"replace it by a text file with the line {RESULTS}"
        raise SelectionError(Problem(f"cannot be read: {error}", remedy, file=str(path))) from None
    if {line.strip() for line in text.splitlines()} & {*_SAME}:
        return ""
    return text + "\n" * bool(text and not text.endswith("\n")) + f"{RESULTS}\n"


def _abilities(name: str, pool: Pool) -> tuple[list[str], list[str]]:
    """The mesh axes and backends that ``name`` declares without options, asked in a leader.

    :raises SelectionError: it cannot be loaded, refuses to be without options, declares no axes or
        what the contract does not know, or ended the process that asked.
    """
    from shardproof.registry import preflight

    asked: dict[str, tuple[str, Options]] = {"abilities": (name, {})}
    (end,) = preflight.ask(preflight.try_to_load, asked, pool)
    ended = f"{name} could not be asked for its axes: {preflight.ending(end)}"
    *faults, axes, backends = end.value or (ended, "", "", [], [])
    if fault := next(filter(None, faults), ""):
        remedy = "name a class that works without options (nothing was written)"
        raise SelectionError(replace(preflight.problem_of(fault, remedy), value=name))
    return axes, backends


def _differs(path: Path, text: str | None) -> bool:
    """Whether ``path`` is there and holds anything but ``text``."""
    same = text is not None and path.is_file() and path.read_bytes() == text.encode()
    return path.exists() and not same


class NothingHeld(typer.Exit):
    """No case passed."""


def _make_baseline(into: Path, jobs: int | None) -> int:
    """Run the scenario that is in ``into`` and keep its results; the exit code of the run.

    :raises NothingHeld: no case passed.
    :raises typer.Exit: the run did not come to its end.
    """
    from shardproof.commands.execution import run_and_exit
    from shardproof.compare import baseline
    from shardproof.runs.run_folder import read

    cases = options.Filters(scenarios=[str(into / PLACES["strategy.yaml"])]).cases()
    code = verdicts.HELD
    with tempfile.TemporaryDirectory(prefix="shardproof-init-") as folder:
        results = Path(folder) / "run"
        try:
            run_and_exit(cases, options.SessionOptions(jobs=jobs, results=results), is_kept=False)
        except typer.Exit as ended:
            code = ended.exit_code
            if code not in (verdicts.HELD, verdicts.BROKEN, verdicts.NOT_DECIDED):
                raise
        counts = verdicts.count(read(results).cases)
        if not any(counts[verdict] for verdict in verdicts.GREEN):
            told = ", ".join(f"{counts[v]} {v}" for v in verdicts.VERDICTS if counts[v])
            what = f"no case passes ({told}), so no baseline was written"
            echo(f"{what}; run this again when some cases pass", err=True)
            raise NothingHeld(code)
        baseline.save(baseline.load(str(results)), into / BASELINE)
    return code


@contextmanager
def _all_or_none(into: Path, paths: Sequence[Path]) -> Iterator[None]:
    """Whatever ends the block early leaves files and folders as they were; where nothing held, the
    scenario stays, whose cases the run has named.
    """
    before = {path: path.read_bytes() for path in (into / p for p in paths) if path.exists()}
    folders = {into / folder for path in paths for folder in path.parents}
    new = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except BaseException as error:
        kept = {PLACES["strategy.yaml"]} if isinstance(error, NothingHeld) else set()
        for path in (into / p for p in paths if p not in kept):
            path.unlink(missing_ok=True)
            if path in before:
                path.write_bytes(before[path])
        for folder in sorted(new, key=lambda folder: -len(folder.parts)):
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        names = "".join(f" but {into / path}" for path in sorted(kept))
        echo(f"nothing was written{names}", err=True)
        raise


def written(
    impl: str, axes: Sequence[str], backends: Sequence[str], install: str
) -> Mapping[Path, str]:
    """Path -> text of all files but the baseline, for what ``impl`` declares."""
    sizes = ", ".join(f"{axis}: 2" for axis in axes)
    mesh = f"{{{sizes}}}" if len(axes) > 1 else f"{{{axes[0]}: [2, 3]}}"
    quoted = ", ".join(f'"{axis}": 2' for axis in axes)
    worlds = f"meshes=[{{{quoted}}}]" if len(axes) > 1 else "worlds=(2, 3)"
    # What prove takes for granted.
    places = "" if not backends or USUAL in backends else f', backends=("{backends[0]}",)'
    values = {"IMPL": impl, "MESHES": worlds + places, "MESH": mesh, "INSTALL": install}
    templates = {Path("tests/test_shardproof.py"): TEST}
    for name, path in PLACES.items():
        templates[path] = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for mark, value in values.items():
        templates = {path: text.replace(f"@{mark}@", value) for path, text in templates.items()}
    return templates
