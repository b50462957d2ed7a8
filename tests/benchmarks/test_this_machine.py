import re
from pathlib import Path

import pytest

from benchmarks.contestants.works import decoding
from benchmarks.this_machine import row, works

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_its_rows_stand_in_the_page() -> None:
    rows = re.findall(r"^\| ((?:train|decode|prompt) [^|]*) \|", PAGE.read_text(), re.MULTILINE)
    ours = [measure.name for work in works("") for measure in work.measures.values()]
    assert len(ours) == 8
    assert set(ours) <= set(rows)


@pytest.mark.parametrize(("precision", "bits"), [("bfloat16", 16), ("int8", 8.5), ("int4", 4.5)])
def test_the_share_of_decoding_is_the_weights_read_of_the_memory(
    precision: str, bits: float
) -> None:
    """The shape: width 768, 12 layers of 4 * 768² and 3 * 768 * 2048, and a head of 32,000."""
    (measure,) = decoding("160m", precision, "").measures.values()
    gbytes = (12 * (4 * 768**2 + 3 * 768 * 2048) + 768 * 32_000) * bits / 8 / 1e9
    line = row(measure, 100, 200 * gbytes)
    assert line.startswith(f"| decode 160m, {precision} | 100 tokens/s, 50% |")
