"""``python -m tools.studies NAME``: measurements of the suite itself, kept as evidence."""

from __future__ import annotations

import typer

from shardproof.commands import main
from tools.studies import (
    autopsies,
    backends,
    checkpoints,
    elastic,
    false_alarms,
    model_check,
    overhead,
)
from tools.studies.convergence import on_nodes
from tools.studies.convergence import study as convergence
from tools.studies.mutation import study as mutation

#: Each command returns its exit code.
studies = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Measure the suite itself: false alarms, its own cost, its models.

    \b
    python -m tools.studies NAME
      overhead                   what the largest schedules cost
      false-alarms --results R   how often `bench` is wrong on this machine
      model-check                whether the model of step times holds here
      backends                   equal bits and CPU seconds on gloo and mpi
      autopsies                  whether each hang, and only a hang, gets the right cause
      checkpoints 300            random clean saves, loads and reshapes: none may fail
      convergence                whether lossy and stale methods reach a target as soon
      convergence-on-nodes       the same in containers, with a network between them
      elastic                    workers and agents of torchrun are killed
      mutation 200               which systematic faults of the strategies survive
    """,
)
studies.command("overhead", short_help="What the largest schedules cost.")(overhead.run)
studies.command("false-alarms", short_help="How often `bench` errs on this machine.")(
    false_alarms.run
)
studies.command("model-check", short_help="Does the alpha-beta model hold here?")(model_check.run)
studies.command("backends", short_help="Equal bits, and CPU seconds, on several backends.")(
    backends.command
)
studies.command("checkpoints", short_help="Random clean saves, loads and reshapes: does any fail?")(
    checkpoints.run
)
studies.command(
    "autopsies", short_help="Random fault plans and clean cases while every core is busy."
)(autopsies.run)
studies.command("convergence", short_help="Do lossy, local and stale methods get there as soon?")(
    convergence.convergence
)
studies.command(
    "convergence-on-nodes",
    context_settings={"ignore_unknown_options": True},
    short_help="Train to a target loss on containers as nodes.",
)(on_nodes.command)
studies.command("mutation", short_help="Plant systematic faults in the reference strategies.")(
    mutation.command
)
studies.command("elastic", short_help="Kill workers and agents of torchrun: are numbers right?")(
    elastic.command
)

if __name__ == "__main__":
    main.main(studies)
