import re
from pathlib import Path

from benchmarks.this_machine import works

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_its_rows_stand_in_the_page() -> None:
    rows = re.findall(r"^\| ((?:train|decode|prompt) [^|]*) \|", PAGE.read_text(), re.MULTILINE)
    names = [measure.name for work in works("") for measure in work.measures.values()]
    ours = [name for name in names if not name.startswith("limit: ")]
    assert len(ours) == 8
    assert set(ours) <= set(rows)
