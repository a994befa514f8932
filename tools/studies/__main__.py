"""``python -m tools.studies NAME``: measurements of the suite itself, kept as evidence."""

from __future__ import annotations

import typer

from shardproof.commands import main
from tools.studies import (
    autopsies,
    backends,
    calibrate,
    checkpoints,
    elastic,
    false_alarms,
    model_check,
    overhead,
    shrink,
    step_seconds,
    training,
)
from tools.studies.convergence import on_nodes
from tools.studies.convergence import study as convergence
from tools.studies.first_difference import study as first_difference
from tools.studies.mutation import study as mutation

#: Each command returns its exit code.
studies = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure the suite itself: false alarms, its own cost, its models.",
)
for _name, _command, _help in (
    ("calibrate", calibrate.run, "Are errors of clean runs far enough below the thresholds?"),
    ("overhead", overhead.run, "The cost of the largest schedules."),
    ("false-alarms", false_alarms.run, "How often `bench` errs on this machine."),
    ("model-check", model_check.run, "Does the model of step times hold here?"),
    ("step-seconds", step_seconds.run, "Are predicted seconds of a step right here?"),
    ("backends", backends.command, "Equal bits, and CPU seconds, on several backends."),
    ("autopsies", autopsies.run, "Does each hang, and only a hang, get the right cause?"),
    ("checkpoints", checkpoints.run, "Random clean saves, loads and reshapes: does any fail?"),
    ("convergence", convergence.convergence, "Do lossy and stale methods reach a target as soon?"),
    ("training", training.run, "The cost of `Training` over the plain loop of a strategy."),
    ("elastic", elastic.command, "Kill workers and agents of torchrun: are numbers right?"),
    ("first-difference", first_difference.run, "Does `locate` name planted faults?"),
    ("mutation", mutation.command, "Which systematic faults of the strategies survive?"),
    ("shrink", shrink.run, "How far do planted faults shrink, and at what cost?"),
    ("convergence-on-nodes", on_nodes.command, "`convergence` in containers on a network."),
    ("step-seconds-on-nodes", step_seconds.on_nodes, "`step-seconds` in containers on a network."),
):
    _settings = {"ignore_unknown_options": _name.endswith("-on-nodes")}
    studies.command(_name, short_help=_help, context_settings=_settings)(_command)

if __name__ == "__main__":
    main.main(studies)
