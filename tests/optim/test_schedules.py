import pytest

from workhorse.optim.groups import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    WsdConfig,
)


@pytest.mark.parametrize("kind", [ConstantConfig, CosineConfig, LinearConfig, WsdConfig])
def test_warm_up_rises_in_equal_steps_to_the_peak(kind: type) -> None:
    schedule = kind(warmup_steps=4)
    assert [schedule.factor(step, 20) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("schedule", "halfway", "last"),
    [
        (ConstantConfig(), 1.0, 1.0),
        (LinearConfig(final=0.2), 0.6, 0.2),
        (CosineConfig(final=0.2), 0.6, 0.2),
        (WsdConfig(decay=0.25, final=0.2), 1.0, 0.2),
        (WsdConfig(decay=1.0, final=0.2), 0.6, 0.2),
    ],
)
def test_shape_between_peak_and_end(schedule, halfway: float, last: float) -> None:
    steps = 10_000
    assert schedule.factor(0, steps) == pytest.approx(1)
    assert schedule.factor(steps // 2, steps) == pytest.approx(halfway)
    assert schedule.factor(steps - 1, steps) == pytest.approx(last, abs=1e-3)


def test_wsd_stays_at_the_peak_until_its_decay() -> None:
    factors = [WsdConfig(warmup_steps=10, decay=0.5).factor(step, 110) for step in range(110)]
    assert factors[10:61] == [1.0] * 51
    assert factors[61:] == sorted(factors[61:], reverse=True)
    assert 0 < factors[-1] < 0.03


def test_the_schedule_of_2017_is_the_minimum_of_its_two_parts() -> None:
    """1706.03762, equation 3, as a fraction of its peak; the paper counts steps from 1."""
    schedule = InverseSqrtConfig(warmup_steps=4000)
    for step in (1, 100, 4000, 4001, 100_000):
        formula = min(step**-0.5, step * 4000**-1.5)
        assert schedule.factor(step - 1, 200_000) == pytest.approx(formula * 4000**0.5)
