"""Campaign: the figures of `workhorse plan` match measured steps of about 150 models and settings.

    make campaign-accounting

Parameters, operations, activations and the cache are exactly equal. The peak is within 5 % of the
allocator's record. `tests/plan/accounting.py` has the cases, and writes the same rows into
`docs/accounting.md`.
"""

import pytest

from tests.plan.accounting import QUANTITIES, measure_all

pytestmark = pytest.mark.campaign
EXACT = QUANTITIES[:-1]


def test_the_account_is_what_a_step_does() -> None:
    rows = measure_all([], notify=print)
    assert len(rows) >= 100
    for row in rows:
        for quantity in EXACT:
            where = f"{row.name} ({row.setting}): {quantity}"
            assert row.predicted[quantity] == row.measured[quantity], where
        assert abs(row.difference("peak")) < 0.05, f"{row.name} ({row.setting}): peak"
