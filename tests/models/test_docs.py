"""docs/models.md says of every preset what the preset says of itself."""

from pathlib import Path

from workhorse.models import Preset, presets
from workhorse.models.describe import summary

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def row(found: Preset) -> str:
    shape = summary(found)
    heads, kv_heads = shape["n_heads"], shape["n_kv_heads"]
    verdict = {True: "", False: " ≠", None: "—"}[found.agrees]
    cells = (
        f"`{found.name}`",
        f"{found.parameters:,}",
        f"{found.printed}{verdict}",
        found.exactness,
        shape["n_layers"],
        shape["d_model"],
        heads if heads == kv_heads else f"{heads}/{kv_heads}",
        shape["head_dim"],
        shape["d_ff"],
        f"{shape['vocab_size']:,}",
        shape["max_seq_len"],
    )
    return f"| {' | '.join(map(str, cells))} |"


def test_the_table_has_a_true_row_for_each_preset() -> None:
    expected = [row(found) for found in presets().values()]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    columns = expected[0].count("|")
    assert [line for line in lines if line[:3] == "| `" and line.count("|") == columns] == expected


def test_every_source_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [found.source for found in presets().values() if found.source not in text] == []
