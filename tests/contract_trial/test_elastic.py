"""A group that loses a member and gains one, and a late first member: the batch stays the batch."""

from __future__ import annotations

from trial_cases import case, compared, judged, told

from shardproof.contract import OptimizerSpec

SYSTEM = "trial_systems.elastic:Elastic"
#: Step -> members: rank 1 leaves, comes back anew, rank 0 leaves for good.
CHANGES = {"0": (0, 1, 2), "1": (0, 2), "3": (0, 1, 2), "4": (1, 2)}


def test_members_come_and_go() -> None:
    adamw = OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1, clip_norm=0.05)
    base = {"membership": CHANGES, "steps": 5}
    cases = [
        case(SYSTEM, {"replicate": 3}, **base),
        case(SYSTEM, {"replicate": 3}, optimizer=adamw, **base),
        case(SYSTEM, {"replicate": 3}, backend="gloo", **base),
        case(SYSTEM, {"replicate": 2}, membership={"0": (0,), "1": (0, 1)}),
    ]
    results = judged(cases)
    assert {r.verdict for r in results} == {"pass"}, told(results)
    assert all(compared(r) > 100 for r in results)


def test_a_joiner_that_is_not_brought_up_to_date_is_found() -> None:
    broken = case(SYSTEM, {"replicate": 3}, membership=CHANGES, steps=5, options={"heal": False})
    (result,) = judged([broken])
    assert result.verdict == "fail", told([result])
    assert "step 3" in result.reason


def test_a_system_without_it_is_not_asked() -> None:
    plain = case("pytorch/ddp", {"replicate": 3}, membership=CHANGES, steps=5)
    (result,) = judged([plain])
    assert result.verdict == "skip", told([result])
    assert "has no reconfigure" in result.reason
