"""The fixture ``shardproof``, which every pytest has once this package is installed.

    def test_mine(shardproof):
        shardproof(MyZero1)

It judges a class (at the top of a module that ranks can import), a name, or a part of a system
(``shardproof(hook=mine)``), with the arguments of ``shardproof.prove``, and fails the test with
what the judge says of each case that is not green.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import pandas as pd

    from shardproof.contract import Implementation

Judge = Callable[..., "pd.DataFrame"]


@pytest.fixture
def shardproof() -> Judge:
    """Judges an implementation; returns ``prove``'s frame, a row a case."""

    def judge(
        implementation: str | type[Implementation] | None = None, **arguments: Any
    ) -> pd.DataFrame:
        from shardproof import verdicts
        from shardproof.commands.prove import prove

        __tracebackhide__ = True
        frame = prove(implementation, **arguments)
        odd = [
            f"{row['case']}: {row['verdict']}\n    {row['reason']}\n    rerun: {row['rerun']}"
            for row in frame.to_dict("records")
            if verdicts.kind(row["verdict"]) not in (*verdicts.GREEN, "skip")
        ]
        if odd:
            pytest.fail("\n".join([f"{len(odd)} of {len(frame)} cases:", *odd]), pytrace=False)
        if all(verdicts.kind(verdict) == "skip" for verdict in frame["verdict"]):
            why = "; ".join(dict.fromkeys(frame["reason"]))
            if "not installed" in why:
                pytest.skip(why)
            remedy = "give settings that it supports, such as backends=('gloo',)"
            pytest.fail(f"nothing was judged: {why}: {remedy}", pytrace=False)
        return frame

    return judge
