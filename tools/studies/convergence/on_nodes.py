"""The study on containers as nodes: its requirements, and its start in the head."""

from __future__ import annotations

from shardproof.cluster import head
from shardproof.cluster.shape import Shape, Words
from shardproof.commands import options
from tools.studies.convergence import plan, study

#: What the head of a cluster runs: images hold tools/ as well.
PROGRAM = ("python3", "-m", "tools.studies")


@options.grouped(ranks_per_node=1)
def command(words: Words = None, *, wanted: Shape) -> int:
    """Train to a target loss with ranks in containers: `convergence`, with its options.

    \b
    python -m tools.studies convergence-on-nodes cluster --bandwidth 100mbit
    python -m tools.studies convergence-on-nodes mine.yaml --nodes 4 --seeds 8
    python -m tools.studies convergence-on-nodes charnames --backend gloo --nodes 3

    Nodes are those of `shardproof cluster bench`. The page tells steps, bytes and seconds to the
    target, and which method is there first; it is convergence.md in the run folder, with its
    drawings and with convergence.json, which `convergence --from` judges again.
    """
    wanted.limits(), wanted.slowed()  # refused at once
    words = words or []
    given = head.meant(study.convergence, words).params
    names = given["scenario"] or ()
    chosen = plan.chosen(names, given["method"], given["seeds"], given["backend"])
    plan.require_room(chosen, wanted.there)
    systems = {run.system for one in chosen for method in one.every for run in method.runs}
    needs = head.needs_of(systems, {one.first.backend for one in chosen}, wanted)
    seen = head.own_folders(names, sorted(systems))
    return head.run(["convergence", *words], wanted, needs, seen, program=PROGRAM)
