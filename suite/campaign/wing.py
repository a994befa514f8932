"""The contribution of this wing: random clean cases for ``run``, ``mutants`` and ``list``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardproof.errors import Problem, SelectionError
from shardproof.wings import Wing

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.commands.options import Output, SessionOptions
    from shardproof.coverage.pairs import Coverage


class Campaign(Wing):
    """Random clean cases, and planted faults in them."""

    def random_cases(self, count: int, seed: int, impl: Sequence[str]) -> Sequence[Case]:
        """The first ``count`` cases of ``seed``."""
        from shardproof.campaign import draws

        return draws.first_cases(count, seed, impl)

    def random_case(self, name: str) -> Case:
        """The case of a campaign, or the history of saves, with the id ``name``.

        :raises SelectionError: this is no such id.
        """
        from shardproof.campaign import draws, histories

        if (case := draws.by_id(name) or histories.by_id(name)) is None:
            remedy = "give the whole id that a campaign printed; -k ID selects a case of a scenario"
            raise SelectionError(Problem("--case is not the id of a random case", remedy, name))
        return case

    def coverage(self, count: int, seed: int, impl: Sequence[str]) -> tuple[Coverage, str]:
        """Pairs that the first ``count`` cases of ``seed`` meet."""
        from shardproof.campaign import draws

        return draws.coverage(count, seed, impl)

    def conditions(self, cases: Sequence[Case]) -> str:
        """The share of possible triples that ``cases`` meet."""
        from shardproof.campaign import conditions

        return conditions.sentence(cases)

    def plant(
        self, faults: Sequence[Any], most: int, seed: int, asked: SessionOptions, output: Output
    ) -> int:
        """Plant ``faults`` until each is killed, in at most so many cases."""
        from shardproof.campaign import kills

        return kills.run(faults, most, seed, asked, output)


WING = Campaign()
