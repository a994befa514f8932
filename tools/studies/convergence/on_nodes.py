"""The study on containers as nodes: what it needs there, and what starts it in the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardproof.cluster import head
from shardproof.cluster.shape import Shape
from tools.studies.convergence import plan

#: What the head of a cluster runs: images hold tools/ as well.
PROGRAM = ("python3", "-m", "tools.studies")


def run(convergence: Callable[..., None], words: Sequence[str], wanted: Shape) -> int:
    """Run the command ``convergence`` with ``words`` in the head of a new cluster; its exit code.

    :raises InputError: words that do not fit each other, what they name, or the nodes.
    """
    wanted.limits(), wanted.slowed()  # refused at once
    given = head.meant(convergence, words).params
    names = given["scenario"] or ()
    studies = plan.read(plan.files(names), given["seeds"], given["backend"])
    studies = [one.only(given["method"] or ()) for one in studies]
    plan.require_room(studies, wanted.there)
    systems = {run.system for one in studies for method in one.every for run in method.runs}
    backends = {one.first.backend for one in studies}
    needs = head.needs_of(systems, backends, wanted)
    seen = head.own_folders(names, sorted(systems))
    return head.run(["convergence", *words], wanted, needs, seen, program=PROGRAM)
