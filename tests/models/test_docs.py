"""The tables in the docs list every preset and every model type."""

from pathlib import Path

from workhorse.models import Preset, presets
from workhorse.models.describe import short_count, summary
from workhorse.models.huggingface import MODEL_TYPES, family

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"


def row(found: Preset) -> str:
    shape = summary(found)
    heads, kv_heads = shape["n_heads"], shape["n_kv_heads"]
    active = shape["active_parameters"]
    verdict = {True: "", False: " ≠", None: "—"}[found.agrees]
    cells = (
        f"`{found.name}`",
        f"{found.parameters:,}",
        short_count(active) if active != found.parameters else "",
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


def test_every_model_type_is_measured() -> None:
    """Run `make families` to regenerate the page."""
    lines = (ROOT / "docs" / "families.md").read_text(encoding="utf-8").splitlines()
    measured = [line.split(" | ")[:2] for line in lines if line.startswith("| `")]
    assert measured == [[f"| `{name}`", family(name).architecture] for name in MODEL_TYPES]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(MODEL_TYPES)} model types of transformers are read and written, each" in readme
    assert f"{len(presets())} presets have tested parameter counts" in readme
