"""Options that several commands share, and the selection of cases that they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from shardproof import verdicts, wings
from shardproof.commands.console import echo, is_json
from shardproof.errors import Problem, SelectionError, printable
from shardproof.files import why_not_writable, write_whole

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.cases.runner import CaseHost
    from shardproof.launch.nodes import Nodes
    from shardproof.runs.shard import Shard
    from shardproof.scenarios.selection import Selection
    from shardproof.wings import CaseHosts

R = TypeVar("R")

#: A command line that click does not understand; typer names only an heir of that error.
NOT_UNDERSTOOD: Any = typer.BadParameter.__base__


def grouped(**defaults: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Turn dataclasses among the parameters of a command into options.

    A group of options is a frozen dataclass whose fields are annotated like parameters of a
    command, or are :func:`option`.  A command with a parameter of that class is shown to typer with
    one parameter for each field in its place, and is called with an instance::

        @dataclass(frozen=True, kw_only=True)
        class Blocks:
            blocks: int = option(24, "--blocks", min=2)

        @options.grouped()
        def bench(names: Names = None, *, how: Blocks) -> None: ...

    ``defaults``: other defaults than those of the fields, by name.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        groups: dict[str, Any] = {}
        shown: list[Parameter] = []
        for name, parameter in signature(command, eval_str=True).parameters.items():
            if is_dataclass(parameter.annotation):
                groups[name] = parameter.annotation
                types = get_type_hints(parameter.annotation, include_extras=True)
                own = fields(parameter.annotation)
                shown += (_parameter(one.name, types[one.name], one, defaults) for one in own)
            else:
                shown.append(_parameter(name, parameter.annotation, parameter.default, defaults))

        @wraps(command)
        def called(**given: Any) -> R:
            for name, group in groups.items():
                given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
            return command(**given)

        called.__signature__ = Signature(shown)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in shown}
        return called

    return decorate


def option(default: Any, *flags: str, **about: Any) -> Any:
    """A field of a group, or a parameter of a command that :func:`grouped` decorates: an option.

    ``about``: as of ``typer.Option``.
    """
    return field(default=default, metadata={"typer": typer.Option(*flags, **about)})


def output_option(flag: str, about: str) -> Any:
    """The option ``flag`` of a file to write, none by default; see :func:`output`."""
    return field(default=None, metadata={"typer": output(flag, about)})


def _parameter(name: str, kind: Any, default: Any, defaults: Mapping[str, Any]) -> Parameter:
    """The parameter or field (its ``default``) as typer gets it."""
    if isinstance(default, Field):
        kind = Annotated[kind, default.metadata["typer"]] if default.metadata else kind
        default = Parameter.empty if default.default is MISSING else default.default
    default = defaults.get(name, default)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def given(context: typer.Context) -> dict[str, Any]:
    """The options and arguments that were typed, by flag (``--bytes``) or name of the parameter."""
    typed = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            typed[parameter.opts[0]] = context.params[parameter.name or ""]
    return typed


TierName = Literal["quick", "full"]
Scenarios = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCENARIO",
        help="files, folders, scenarios or case ids (default: folders conformance and checkpoint)",
    ),
]
Impl = Annotated[
    list[str] | None,
    typer.Option(
        "--impl", metavar="P", help="select implementations by a glob, or test package.module:Class"
    ),
]
BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="B",
        help="select the cases of backend B. If B is not gloo or in_memory (for example mpi), the "
        "cases of gloo and in_memory are selected too, and they run on B",
    ),
]
World = Annotated[
    list[int] | None, typer.Option("--world", metavar="N", help="select the cases with N ranks")
]
Expression = Annotated[
    str,
    typer.Option(
        "-k", metavar="EXPR", help="select cases by parts of ids, with `and`, `or`, `not` and ( )"
    ),
]
Tier = Annotated[TierName, typer.Option("--tier", help="quick: a subset of the cases; full: all")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="S", min=0, max=2**31 - 1, help="seed of models and data"),
]
Campaign = Annotated[
    int | None,
    typer.Option("--campaign", metavar="N", min=1, max=100_000, help="N random cases (by --seed)"),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget", metavar="MIN", min=0.01, help="run only the cases that fit into MIN minutes"
    ),
]

Jobs = Annotated[
    int | None,
    typer.Option(
        "-j", metavar="JOBS", min=1, max=256, help="number of parallel cases (default: 1 per core)"
    ),
]

ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="run only part I of N; see `shardproof merge`"),
]


def of_campaign(ask: Callable[[wings.Wing], R | None]) -> R:
    """The answer of the wing that draws random cases.

    :raises SelectionError: this tree does not have that wing.
    """
    return wings.required("campaign", "--campaign", ask)


def case_hosts(where: str) -> CaseHosts:
    """The judge of cases at the place that ``--on`` names.

    :raises SelectionError: it names none.
    """
    return wings.required("cluster", "--on", lambda wing: wing.case_hosts(where))


def _place(where: str | None) -> str | None:
    """``where``, if cases can be judged there: checked before anything runs."""
    if where is not None:
        case_hosts(where)
    return where


@contextmanager
def joined(where: str | None, jobs: int | None) -> Iterator[CaseHost | None]:
    """The judge of cases at ``where``, joined while the command runs; ``None``: this machine.

    :raises SelectionError: it cannot be joined.
    """
    if where is None:
        yield None
        return
    with case_hosts(where)(jobs) as there:
        echo(str(there), err=True)
        yield there


def wait_for(nodes: Nodes | None) -> None:
    """Return once the agents of all nodes are there.

    :raises typer.Exit: one does not come; told.
    """
    from shardproof.launch.nodes import NodeGone

    if nodes is not None:
        try:
            nodes.wait()
        except NodeGone as error:
            echo(f"precondition: {error}", err=True)
            raise typer.Exit(verdicts.NOT_DECIDED) from None


def shard_of(text: str | None) -> Shard | None:
    """The part that the option means.

    :raises SelectionError: no part.
    """
    from shardproof.runs.shard import parse

    return None if text is None else parse(text)


def named(text: str) -> Path:
    """The path that an option gives; an empty one would be the working folder."""
    if not text:
        raise typer.BadParameter("the name is empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # what a run tells of itself is JSON
        raise typer.BadParameter("the name is not valid UTF-8: choose another name") from None
    return Path(text)


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """A file that an option will have written: asked before anything runs.

    :raises SelectionError: it cannot be.
    """
    if path is not None and (why := why_not_writable(path)):
        problem = Problem(f"{option.opts[0]}: {why}", "name a file to write", str(path))
        raise SelectionError(problem)
    return path


def require_new(option: str, path: Path | None) -> None:
    """:raises SelectionError: the run folder that ``option`` names holds something."""
    if path is not None and path.is_dir() and any(path.iterdir()):
        raise SelectionError(Problem(f"{option}: is not empty", "name a new folder", str(path)))


def output(flag: str, about: str) -> Any:
    """The option ``flag`` of a file to write."""
    return typer.Option(flag, metavar="FILE", help=about, callback=writable)


def write(path: Path, text: str) -> None:
    """Write the file of such an option, whole; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, printable(text))


Results = Annotated[
    Path | None,
    typer.Option(
        "--results",
        metavar="RUN",
        help="folder of the run; if the folder already holds a run, cases are added to that run",
        parser=named,
    ),
]
#: A run that is looked at.
Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="run folder, id or bundle (default: newest run)")
]


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How much a command runs at once and for how long, which part of it, and where results go."""

    budget: Budget = None
    jobs: Jobs = None
    results: Results = None
    shard: ShardOption = None

    @property
    def part(self) -> Shard | None:
        """The part of the selection that is run; ``None``: all of it.

        :raises SelectionError: no part.
        """
        return shard_of(self.shard)


@dataclass(frozen=True, kw_only=True)
class Output:
    """How much a command prints."""

    verbose: bool = option(False, "--verbose", "-v", help="print every row, not one row per system")
    quiet: bool = option(False, "--quiet", "-q", help="print only failures and a summary line")
    no_progress: bool = option(False, "--no-progress", help="print no progress")

    @property
    def rows(self) -> bool:
        """Whether every row is printed: for people who ask, and for programs."""
        return (self.verbose and not self.quiet) or is_json()

    @property
    def progress(self) -> bool:
        """Whether it is seen how far the command is."""
        return not (self.quiet or self.no_progress or is_json())


@dataclass(frozen=True, kw_only=True)
class HowRun(Output):
    """Where and how far cases are run, what is printed, and which other files are written."""

    on: str | None = option(
        None, "--on", metavar="RAY", callback=_place, help="run on Ray: 'ray' (local) or ray://HOST"
    )
    fail_fast: int | None = option(
        None, "--fail-fast", "--maxfail", metavar="N", min=1, help="stop when N cases have failed"
    )
    first_failure: bool = option(False, "-x", help="stop at the first failure, as --maxfail 1")
    junit: Path | None = output_option("--junit", "also write JUnit XML to FILE")  # noqa: RUF009
    shrink: bool = option(False, "--shrink", help="reduce failed cases (`shardproof shrink`)")
    dry_run: bool = option(False, "--dry-run", "--collect-only", help="only print the cases")

    @property
    def most_failures(self) -> int | None:
        """After how many failures no further case starts."""
        return 1 if self.first_failure else self.fail_fast


#: All cases, on this machine.
WHOLE = HowRun()


@dataclass(frozen=True, kw_only=True)
class Filters:
    """The choice of scenario cases, in all commands that have it."""

    scenarios: Scenarios = None
    impl: Impl = None
    backend: BackendOption = None
    world: World = None
    like: str = option(
        "", "--like", metavar="P", help="your class gets the cases of systems that match the glob P"
    )
    expression: Expression = ""
    tier: Tier = "quick"
    seed: Seed = None

    def given(self) -> dict[str, object]:
        """The filters that a campaign does not take, by the name on the command line."""
        return {
            "SCENARIO": self.scenarios,
            "--backend": self.backend,
            "--world": self.world,
            "-k": self.expression,
            "--like": self.like,
        }

    def selection(self) -> Selection:
        """The cases that the filters mean."""
        from shardproof.scenarios.selection import Selection

        return Selection(
            scenarios=self.scenarios or (),
            implementations=self.impl or (),
            backends=self.backend or (),
            worlds=self.world or (),
            expression=self.expression,
            tier=self.tier,
            seed=self.seed,
            like=self.like,
        )

    def cases(self) -> list[Case]:
        """The cases of scenarios that the filters mean.

        :raises InputError: a faulty scenario file, an unknown name, or no match.
        """
        from shardproof.scenarios.vocabulary import installed

        return self.selection().cases(installed())


def refuse(given: Mapping[str, object], what: str, value: object = "") -> None:
    """Refuse the first of ``given`` (name on the command line -> value) that was given.

    :raises SelectionError: one was; ``what`` is the problem, and the remedy names it.
    """
    if clash := next((name for name, found in given.items() if found), ""):
        raise SelectionError(Problem(what, f"leave out {clash}", str(value) or None))
