"""The compiled operators, for the tests that compare them with their plain forms."""

import pytest

from workhorse import native


@pytest.fixture(scope="session")
def operators() -> None:
    """Compiled at most once on a machine; where they cannot be, what needs them is skipped."""
    reason = native.why_not(wait=True)
    if reason is not None:
        pytest.skip(reason)
