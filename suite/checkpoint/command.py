"""``shardproof checkpoint``: what is in one, is it whole, how do two differ, another format.

Nothing of a checkpoint is ever executed, and at most a block of one tensor is in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shardproof import verdicts
from shardproof.commands.console import echo

checkpoints = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Inspect checkpoints of reference strategies: docs/checkpoints.md.

    \b
    shardproof checkpoint inspect PATH          its contents, and the system that saved it
    shardproof checkpoint verify PATH           check every byte against its checksum
    shardproof checkpoint diff PATH OTHER       differences between two checkpoints
    shardproof checkpoint convert PATH FOLDER --to full

    PATH is a checkpoint, or a folder of checkpoints (the newest checkpoint is used).
    """,
)
PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="a checkpoint, or a folder (its newest checkpoint)")
]


@checkpoints.command(short_help="Show the contents of a checkpoint and the system that saved it.")
def inspect(
    path: PathArgument,
    names: Annotated[bool, typer.Option("--names", help="print a row for each tensor")] = False,
) -> None:
    """Show the contents of a checkpoint: strategy, mesh, step, names of tensors (no values).

    Exit code 2: there is no checkpoint, or its manifest, an index or a header is damaged.

    \b
    shardproof checkpoint inspect checkpoints
    shardproof checkpoint inspect checkpoints/step-00000012-save-0002-3fa94c11-7be2 --names
    """
    from shardproof.checkpoint import contents
    from shardproof.commands.console import make_console
    from shardproof.registry.checkpoints import opened

    with opened(path) as checkpoint:
        for line in contents.sentences(checkpoint):
            echo(line)
        make_console().print(contents.tensors(checkpoint) if names else contents.kinds(checkpoint))


@checkpoints.command(short_help="Read a whole checkpoint and check every byte.")
def verify(path: PathArgument) -> None:
    """Read every byte, compare it with the checksums, and print the SHA-256 of the contents.

    The SHA-256 covers names, dtypes, shapes and elements, not files: two formats of one checkpoint
    have the same SHA-256. Exit code 2: the output has a line for each damaged place.

    \b
    shardproof checkpoint verify checkpoints
    """
    from shardproof.checkpoint import contents
    from shardproof.registry.checkpoints import as_problem, opened

    with opened(path) as checkpoint:
        problems = list(checkpoint.verify())
        for problem in problems:
            echo(str(as_problem(problem)), err=True)
        if problems:
            raise typer.Exit(verdicts.BAD_INPUT)
        echo(f"{checkpoint.folder}: whole, {contents.size(checkpoint)}")
        for caveat in checkpoint.caveats:
            echo(caveat)
        echo(f"SHA-256 {contents.digest(checkpoint)}")


@checkpoints.command(short_help="Show the differences between two checkpoints.")
def diff(
    path: PathArgument,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="the checkpoint to compare with")],
) -> None:
    """Compare two checkpoints bit for bit, tensor by tensor, whatever their formats and layouts.

    The output lists the tensors that only one checkpoint has. For each tensor that differs, it
    shows the norms and the first element that differs. Exit codes: 0 no difference, 1 some
    differences, 2 a checkpoint cannot be read.

    \b
    shardproof checkpoint diff checkpoints/step-00000012-save-0002-3fa94c11-7be2 checkpoints
    """
    from shardproof.checkpoint import contents
    from shardproof.commands.console import make_console
    from shardproof.registry.checkpoints import opened

    with opened(path) as one, opened(other) as two:
        said = contents.of_metadata(one, two)
        table = contents.of_tensors(one, two)
    for line in said:
        echo(line)
    if table.rows:
        make_console().print(table)
    if said or table.rows:
        raise typer.Exit(verdicts.BROKEN)
    echo("no difference")


@checkpoints.command(short_help="Write a checkpoint in another format.")
def convert(
    path: PathArgument,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="the folder for the new checkpoint")
    ],
    to: Annotated[Literal["full", "sharded", "dcp"], typer.Option("--to", help="the new format")],
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, max=16384, help="files of 'sharded'")
    ] = 1,
) -> None:
    """Write a checkpoint in another format. The old checkpoint is verified, and it is kept.

    `full` is for other tools: model.safetensors uses the module's names. `sharded` has equal
    parts for N ranks; no load needs this format, because every system reads every layout.

    \b
    shardproof checkpoint convert checkpoints whole --to full
    shardproof checkpoint convert whole parts --to sharded --ranks 8
    """
    from shardproof.registry import checkpoints as own

    with own.opened(path) as source:
        echo(str(own.convert(source, folder, to, ranks)))
