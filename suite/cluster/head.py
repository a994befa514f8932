"""A command in the head of a cluster that is made for it: what it means, what it sees, its end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from shardproof import verdicts
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.cluster.containers.needs import Needs
    from shardproof.cluster.shape import Shape

#: Options of the cluster's own commands; others are those of the command in its head.
PASSING_ON = {"ignore_unknown_options": True}
#: The command line of the suite.
SHARDPROOF = ("python3", "-m", "shardproof")
#: Options of the command in the head that mean nothing there.
_NOT_THERE = {
    "on": "leave --on out: cases are judged in the head container",
    "junit": "leave --junit out: the run folder holds junit.xml",
    "dry_run": "run the command without `cluster`",
    "again": "run the command without `cluster`: it trains nothing",
}
#: Names on the command line of parameters that have another one.
_FLAGS = {"again": "from"}


def meant(command: Callable[..., object], words: Sequence[str]) -> Any:
    """The context of ``command`` with these words, which is to run in the head.

    :raises SelectionError: an option that means nothing there.
    """
    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    name = f"shardproof {command.__name__}"
    found: Any = typer.main.get_command(alone).make_context(name, [*words])
    for option in _NOT_THERE:
        if found.params.get(option):
            refuse(option)
    return found


def refuse(option: str) -> NoReturn:
    """:raises SelectionError: ``option`` means nothing in the head."""
    flag = f"--{_FLAGS.get(option, option).replace('_', '-')}"
    raise SelectionError(Problem(f"{flag} does not work in a cluster", _NOT_THERE[option], flag))


def needs_of(names: Iterable[str] | None, backends: Any, wanted: Shape) -> Needs:
    """The request in the words of a command; ``backends``: one, several, or none."""
    from shardproof.cluster.containers.needs import Needs

    asked = [backends] if isinstance(backends, str) else list(backends or ())
    return Needs.of(names or (), asked, wanted.ranks_per_node)


def run(
    command: Sequence[str],
    wanted: Shape,
    needs: Needs,
    seen: Iterable[Path],
    faults: Mapping[str, Any] | None = None,
    program: Sequence[str] = SHARDPROOF,
) -> int:
    """Run ``program`` with the words of ``command``, and ``--results``, in a new cluster.

    ``seen``: files and folders that containers see; ``faults``: what is planned of those of nodes.

    :raises typer.Exit: containers cannot be had here, or are not as declared; told.
    :raises SelectionError: the run folder cannot be written, or something is not to be ``seen``.
    """
    from shardproof.cluster.containers import cluster, engine
    from shardproof.cluster.containers.guardian import guarded
    from shardproof.cluster.containers.image_inputs import EVERYTHING
    from shardproof.cluster.containers.needs import require_gpus

    seen, limits, slowed = readable(seen), wanted.limits(), wanted.slowed()
    if wanted.all_packages:
        needs = replace(needs, targets=EVERYTHING)
    with engine_here() as client:
        if needs.gpus.per_node:
            require_gpus(client, engine.torch_of_images())
        images = engine.build(client, targets=needs.targets)
        with run_folder(wanted.results) as folder:
            made = cluster.Cluster(
                name=cluster.name_of_a_run(),
                nodes=wanted.nodes,
                ranks_per_node=wanted.ranks_per_node,
                results=writable(folder),
                folder=Path.cwd(),
                images=images,
                own=seen,
                caps=limits,
                slow=slowed,
                gpus=needs.gpus,
                command=["shardproof", *sys.argv[1:]],
                faults=faults,
            )
            with guarded(made.name, folder):
                words = [*program, *command, "--results", str(folder)]
                return cluster.run(client, made, words, say, wanted.keep)


def say(text: str) -> None:
    """Print what the head says, as it comes."""
    echo(text, nl=False)
    sys.stdout.flush()


@contextlib.contextmanager
def engine_here() -> Iterator[Any]:
    """A client of the container engine; what that cannot do ends the command with exit code 3."""
    from shardproof.cluster.containers import cluster, engine

    try:
        client = engine.client()
        with cluster.told_by_the_engine():
            yield client
    except engine.NoCluster as error:
        echo(f"precondition: {error}", err=True)
        raise typer.Exit(verdicts.NOT_DECIDED) from None


@contextlib.contextmanager
def run_folder(given: Path | None) -> Iterator[Path]:
    """The run folder that ``--results`` gives, or a new one, made as no other command's.

    One that was not there before, and stays empty, is removed afterwards.

    :raises SelectionError: that cannot be made.
    """
    from shardproof.commands.supervision import RESULTS
    from shardproof.runs.run_folder import make_folder

    was_there = given is not None and given.exists()
    if given is not None:
        folder = given.resolve()
    else:
        with _told_unwritable(RESULTS):
            folder = make_folder(RESULTS.resolve(), "-cluster")
    try:
        yield folder
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # it holds something, or was never made
                folder.rmdir()


def writable(folder: Path) -> Path:
    """The run folder, which is there before anything runs.

    :raises SelectionError: it cannot be written, or holds something else.
    """
    from shardproof.runs.run_folder import require_run_or_new

    require_run_or_new(folder)
    with _told_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _told_unwritable(folder: Path) -> Iterator[None]:
    """:raises SelectionError: what is inside cannot make ``folder``."""
    try:
        yield
    except OSError as error:
        what, where = f"results cannot be written: {error.strerror}", error.filename or folder
        remedy = "choose another --results folder"
        raise SelectionError(Problem(what, remedy, file=str(where))) from None


def own_folders(scenarios: Sequence[str], impl: Sequence[str]) -> list[Path]:
    """Folders of the user's that containers have to see.

    :raises SelectionError: see :func:`readable`.
    """
    files = [Path(name).resolve() for name in scenarios if Path(name).exists()]
    folders = {file if file.is_dir() else file.parent for file in files}
    if any(":" in name for name in impl) or files:
        folders.add(Path.cwd())
    return readable(folders)


def readable(paths: Iterable[Path]) -> list[Path]:
    """These folders and files, which containers have to see.

    :raises SelectionError: the user that ranks are cannot read one.
    """
    from shardproof.cluster.containers.cluster import rank_user

    found = sorted(paths)
    for path in found:
        kind, needed, mode = ("folder", 0o005, "rx") if path.is_dir() else ("file", 0o004, "r")
        about = path.stat()
        # The group of ranks is that of who started this, unless that is root.
        of_group = os.geteuid() != 0 and about.st_gid == os.getegid()
        allowed = about.st_mode | (about.st_mode >> 3 if of_group else 0)
        if allowed & needed != needed:
            what = f"ranks in containers run as user {rank_user()} and cannot read this {kind}"
            remedy = f"run `chmod {'g' if of_group else 'o'}+{mode}` on it"
            raise SelectionError(Problem(what, remedy, file=str(path)))
    return found
