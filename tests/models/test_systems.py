"""The table of the literature's systems, and its page in docs."""

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.models.systems_page import ROOT, page
from workhorse.errors import WorkhorseError
from workhorse.models import find_preset, preset, preset_names, presets
from workhorse.models.describe import summary
from workhorse.models.systems import find_systems, merged, near_system, row
from workhorse.nn.positions.absolute import AlibiConfig

SYSTEMS = find_systems()
KEYS = {"name", "year", "paper", "arxiv", "presets", "tokenizer", "init", "differs", "gaps"}


def shown(name: str) -> dict[str, Any]:
    (system,) = find_systems(name)
    return row(system)


def test_the_page_is_what_the_configs_give() -> None:
    """Run `make reference` to write it again."""
    assert (ROOT / "docs" / "systems.md").read_text(encoding="utf-8") == page()


def test_every_preset_belongs_to_one_system_and_sizes_ascend() -> None:
    assert Counter(name for one in SYSTEMS for name in one["presets"]) == Counter(preset_names())
    for one in SYSTEMS:
        sizes = [find_preset(name).parameters for name in one["presets"]]
        assert sizes == sorted(sizes), one["name"]


def test_systems_are_in_the_order_of_their_papers() -> None:
    assert [one["year"] for one in SYSTEMS] == sorted(one["year"] for one in SYSTEMS)
    ids = [one["arxiv"] for one in SYSTEMS if "arxiv" in one]
    assert ids == sorted(ids)
    for one in SYSTEMS:
        if "arxiv" in one:
            assert one["year"] == 2000 + int(one["arxiv"][:2]), one["name"]
            sources = {find_preset(name).source for name in one["presets"]}
            named = [one["arxiv"] in source for source in sources]
            assert any(named) or not named, one["name"]


def test_keys_are_known() -> None:
    for one in SYSTEMS:
        assert set(one) <= KEYS or (not one["presets"] and set(one) <= KEYS | set(row(SYSTEMS[0])))


def test_a_norm_before_the_head_is_absent_only_from_post_norm_models() -> None:
    for name, found in presets().items():
        post_norm = {block.kind for block in found.config.blocks.values()} == {"post_norm"}
        assert (found.config.final_norm.kind == "none") == post_norm, name


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("GPT-2", {"parameters": "124M–1.56B", "printed": "117M–1542M", "vocabulary": "50,257"}),
        (
            "llama 2",
            {
                "name": "Llama 2",
                "attention": "7b, 13b: MHA (multi-head); 34b, 70b: GQA (grouped-query, 8 for 64)",
                "layers": "32, 40, 48, 80",
                "d_model": "4096, 5120, 8192, 8192",
                "heads": "32, 40, 64/8, 64/8",
                "context": "4,096",
            },
        ),
        (
            "Llama-2-70b",
            {
                "name": "Llama 2",
                "presets": ["llama-2-70b"],
                "parameters": "69.0B",
                "printed": "70B",
                "layers": "80",
                "heads": "64/8",
                "attention": "GQA (grouped-query, 8 for 64)",
            },
        ),
        ("gpt2", {"name": "GPT-2", "parameters": "124M", "heads": "12", "printed": "117M"}),
        ("deepseek-v2", {"heads": "128", "attention": "MLA (latent)"}),
        ("mixtral", {"parameters": "46.7B–141B, 12.9B–39.2B active"}),
        ("Mistral 7b", {"reach": "v0.1: window 4,096; v0.3: none"}),
        ("gemini", {"attention": "MQA (multi-query)", "presets": []}),
    ],
)
def test_a_row(name: str, columns: dict[str, Any]) -> None:
    assert shown(name).items() >= columns.items()


def test_merged_descriptions() -> None:
    assert merged(["a 1,024 b 2", "a 512 b 2", "a 64 b 2"], ["s", "m", "l"]) == "a 64–1,024 b 2"
    assert merged(["w 0.5", "w 10"], ["s", "l"]) == "w 0.5 or 10"
    assert merged(["x", "", "x"], ["s", "m", "l"]) == "s, l: x; m: none"
    assert merged(["", ""], ["s", "l"]) == ""


def test_a_name_is_exact_before_it_is_a_part() -> None:
    assert [one["name"] for one in find_systems("gpt")] == ["GPT"]
    assert [one["name"] for one in find_systems("GPT-")][:2] == ["GPT-2", "GPT-3"]
    assert [one["name"] for one in find_systems("storywriter")] == ["MPT-7B-StoryWriter"]
    with pytest.raises(WorkhorseError, match="no system is named 'claude'; workhorse models table"):
        find_systems("claude")


def test_punctuation_in_a_name_may_differ() -> None:
    for name in ("gpt4", "GPT 4", "gpt-4"):
        assert [one["name"] for one in find_systems(name)] == ["GPT-4"]
    assert near_system("gpt4") == "its shape is not published, see workhorse models table gpt-4"
    assert near_system("gpt3") == "did you mean 'gpt3-125m'?"
    assert near_system("gem") == ""


def test_heads_of_every_size_are_those_of_the_list() -> None:
    for one in SYSTEMS:
        sizes = [summary(find_preset(name)) for name in one["presets"]]
        counts = [{size["n_heads"], size["n_kv_heads"]} for size in sizes]
        listed = row(one).get("heads", "").split(", ")
        found = [{int(count) for count in text.split("/")} for text in listed if text]
        assert found in (counts, counts[:1]), one["name"]


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from workhorse.models.systems import find_systems; find_systems('gpt'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_storywriters_slopes() -> None:
    """2^(-16 i / 32) for head i of 32, where MPT-7B has 2^(-8 i / 32)."""
    story, base = preset("mpt-7b-storywriter"), preset("mpt-7b")
    for config, bound in ((story, 16), (base, 8)):
        position = config.blocks["main"].attention.position
        assert isinstance(position, AlibiConfig)
        published = [2 ** (-bound * head / 32) for head in range(1, 33)]
        assert position.slopes(32) == pytest.approx(published)
    changed = story.to_dict()
    assert (changed["max_seq_len"], changed["blocks"]["main"]["attention"]["clip"]) == (65536, 6)
    changed["max_seq_len"] = base.max_seq_len
    changed["blocks"]["main"]["attention"] = base.to_dict()["blocks"]["main"]["attention"]
    assert changed == base.to_dict()
