"""Our bfloat16 errors are not larger than the errors of transformers."""

import pytest

from tests.parity.all_cases import ALL
from tests.parity.rounding import measure

CASES = ("llama-1", "gemma-0", "olmo3-1", "gpt_neox-0", "deepseek_v3-0", "cohere2_moe-0", "flint-0")
"""Cases with all ways of rounding in norms, RoPE and multipliers, and with mixtures."""
BOUND = 1.2
"""`docs/families.md` lists the ratio of every shape; none is above 1.06."""


@pytest.mark.parametrize("case", CASES)
def test_errors_are_no_larger_than_theirs(case: str) -> None:
    model_type, _, number = case.rpartition("-")
    rounding, _ = measure(model_type, ALL[model_type][int(number)])
    assert rounding.kept > 0.2 * rounding.tokens  # else nearly all tokens are near ties of routers
    assert 0 < rounding.ratio <= BOUND
    assert rounding.ours < 0.05**2 * rounding.scale
