"""The difference of two log ratios is Welch's; its interval holds the truth as often as it says."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.bench import ratios
from shardproof.compare.snapshot import Sample


def test_welch_is_the_textbook_s() -> None:
    from scipy import stats as reference

    generator = random.Random(3)
    x = [generator.gauss(0.1, 0.2) for _ in range(24)]
    y = [generator.gauss(0.0, 0.05) for _ in range(9)]
    found = ratios.difference(sample(x), sample(y))
    told = reference.ttest_ind(x, y, equal_var=False)
    interval = told.confidence_interval(0.95)
    assert found.p == pytest.approx(told.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert found.freedom == pytest.approx(told.df, rel=1e-9)


def sample(values: list[float]) -> Sample:
    return Sample(statistics.fmean(values), statistics.stdev(values), len(values))


samples = st.builds(
    Sample,
    st.floats(-3, 3),
    st.floats(0, 2),
    st.integers(2, 200),
)


@given(samples, samples)
def test_the_difference_turns_its_sign_with_the_sides(x: Sample, y: Sample) -> None:
    one, other = ratios.difference(x, y), ratios.difference(y, x)
    assert one.mean == -other.mean
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-12)
    assert one.low <= one.mean <= one.high
    least = min(x.blocks, y.blocks) - 1
    assert least * (1 - 1e-9) <= one.freedom <= (x.blocks + y.blocks - 2) * (1 + 1e-9)
    assert one.error >= max(x.error, y.error) * (1 - 1e-12)


@given(samples)
def test_a_sample_beside_itself_differs_by_nothing(x: Sample) -> None:
    found = ratios.difference(x, x)
    assert found.mean == 0 and found.p == 1 and not found.differs


@pytest.mark.parametrize(("sd_x", "n_x", "sd_y", "n_y"), [(0.1, 24, 0.1, 24), (0.3, 8, 0.02, 40)])
def test_intervals_hold_the_truth_as_often_as_they_say(
    sd_x: float, n_x: int, sd_y: float, n_y: int
) -> None:
    """95 % of 2,000 synthetic pairs of sessions; 3.5 standard deviations of a share are 1.7 %."""
    generator, inside, truth = random.Random(11), 0, 0.07
    for _ in range(2000):
        x = [generator.gauss(truth, sd_x) for _ in range(n_x)]
        y = [generator.gauss(0.0, sd_y) for _ in range(n_y)]
        found = ratios.difference(sample(x), sample(y))
        inside += found.low <= truth <= found.high
    assert 0.933 <= inside / 2000 <= 0.967


def test_noisy_sessions_leave_a_wider_margin() -> None:
    quiet, noisy = Sample(0.0, 0.01, 24), Sample(0.0, 0.4, 24)
    assert ratios.margin(quiet, quiet) == math.log1p(ratios.SMALLEST_MARGIN)
    assert ratios.margin(quiet, noisy) > 0.1
    assert ratios.margin(None, None) == math.log1p(ratios.SMALLEST_MARGIN)
    assert ratios.margin(noisy, noisy) > ratios.margin(noisy, None)


def test_single_blocks_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        ratios.difference(Sample(0, 0, 1), Sample(0, 0, 5))
