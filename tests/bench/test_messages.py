"""Messages of a pipeline in the model of a step, by hand: who waits for which, and how long."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_probes import run_of, watched
from test_scaling_meshes import cell, figures, line_of, probed

from shardproof.bench.model.alpha_beta import Fit, Links
from shardproof.bench.model.messages import Window, played
from shardproof.bench.model.step_time import predict
from shardproof.bench.subjects import Call
from shardproof.impls.reference.pipeline.schedules import gpipe, interleaved, one_f_one_b
from shardproof.schedules import Schedule

#: Seconds of a rank's work on a micro-batch: one forward, two backward.
WORK = 3.0


@pytest.mark.parametrize("message", [0.0, 0.25, 1.0, 40.0])
@pytest.mark.parametrize(
    ("schedule", "computes", "messages"),
    [
        # There and back: F on each, then BW on each.
        (one_f_one_b(2, 1), 6, 2),
        # Activation 1 is asked for after F0, gradient 1 after BW0: none is on its way before.
        (gpipe(2, 2), 9, 4),
        # The notice of the next activation stands behind the gradient: all take turns.
        (one_f_one_b(2, 4), 15, 8),
        (one_f_one_b(1, 4), 12, 0),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else None,
)
def test_a_window_by_hand(
    schedule: Schedule, computes: float, messages: int, message: float
) -> None:
    assert played(schedule, WORK, message) == pytest.approx(computes + messages * message)


def test_a_message_that_is_asked_for_early_hides_behind_computation() -> None:
    """A user's order in which stage 1 posts both receives before it computes."""
    known = gpipe(2, 2)
    late = played(known, WORK, 1.0)
    first, second = (action for action in known.orders[1] if action.op == "RF")
    others = [action for action in known.orders[1] if action.op != "RF"]
    orders = known.orders[0], (first, second, *others)
    early = played(dataclasses.replace(known, orders=orders), WORK, 1.0)
    assert (late, early) == (13.0, 12.0)


def test_chunks_share_a_ranks_work() -> None:
    """Without messages two chunks halve the bubble: 12 of work, and 3/2 of it."""
    assert played(one_f_one_b(2, 4), WORK, 0.0) == 15.0
    assert played(interleaved(2, 4), WORK, 0.0) == 13.5
    assert played(interleaved(2, 4), WORK, 0.1) > 13.5


def test_a_step_waits_for_its_messages_and_for_those_of_tied_weights() -> None:
    """A message of 1 MB: 1 s + 2 s; 8 of them, and one of the tied ends after the window."""
    links = Links({"send": Fit("send", 2, 1.0, 2e-6), "all_reduce": Fit("all_reduce", 2, 0.5, 0.0)})
    calls = [Call("send", 2, 1e6, 4, axis="pipe"), Call("all_reduce", 2, 8, floating=False)]
    window = Window(one_f_one_b(2, 4), WORK)
    made = predict(calls, 20.0, links, "gloo", window=window)
    assert (made.alpha_seconds, made.beta_seconds) == (8 * 1.0 + 1.0, 8 * 2.0)
    assert made.step_seconds == 20.0 + 8 * 3.0 + 1.0
    tied = predict([Call("send", 2, 1e6, 5, axis="pipe")], 20.0, links, "gloo", window=window)
    assert tied.communication_seconds == 9 * 3.0
    free = predict(calls, 20.0, links, "gloo", cores_per_rank=2, window=window)
    assert free.overlap == "full" and free.step_seconds == 20.0 + 8 * 3.0
    assert predict(calls, 20.0, links, "gloo").communication_seconds == 4 * 3.0 + 1.0


def test_a_cell_is_modelled_by_the_schedule_that_its_ranks_announced(tmp_path: Path) -> None:
    piped = cell(tmp_path, "two", 2)
    bare = probed(2, {8: 0.08})
    told = bare.model_copy(update={"schedule": one_f_one_b(2, 2).to_dict()})
    alone, made = (figures(line_of(piped, {"pipe": 2}, "pipeline", one)) for one in (bare, told))
    # Two messages of each of two ranks, of which all four stand in each other's way.
    assert made["communication_seconds"] == pytest.approx(2 * alone["communication_seconds"])
    assert made["compute_seconds"] == alone["compute_seconds"]
    other = bare.model_copy(update={"schedule": one_f_one_b(2, 4).to_dict()})
    assert figures(line_of(piped, {"pipe": 2}, "pipeline", other)) == alone


def test_what_a_pipeline_announced_is_recorded() -> None:
    run = run_of("reference/pipeline", "pipe", 2, schedule="1f1b")
    step = watched(
        dataclasses.replace(run, workload=dataclasses.replace(run.workload, micro_batches=4))
    )
    assert step.schedule is not None
    assert Schedule.from_dict(step.schedule).computed(1) == one_f_one_b(2, 4).computed(1)
    assert watched(run_of("reference/ddp", "replicate", 2)).schedule is None
