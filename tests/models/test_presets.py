"""Presets: exact counts, counts printed in the sources, and the registry."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from workhorse.errors import WorkhorseError
from workhorse.models import Preset, find_preset, preset, preset_names, presets
from workhorse.models.describe import active_parameters, count_parameters
from workhorse.models.preset import rounding
from workhorse.nn import DecoderConfig

NAMES = preset_names()

CONTRADICTIONS = {
    "gpt2": "117M",
    "gpt2-medium": "345M",
    "gpt2-large": "762M",
    "gpt2-xl": "1542M",
    "gpt3-1.3b": "1.32B",
    "gpt3-13b": "12.85B",
    "llama-65b": "65.2B",
    "llama-2-70b": "70B",
    "llama-3-70b": "70B",
    "llama-3.1-70b": "70B",
    "llama-3.1-405b": "405B",
    "llama-3.3-70b": "70B",
    "qwen2.5-7b": "7.61B",
    "qwen2.5-14b": "14.7B",
    "qwen2.5-32b": "32.5B",
    "olmo-65b": "65B",
    "olmo-2-13b": "13B",
    "falcon-40b": "40B",
    "falcon-180b": "180B",
    "gemma-2b": "2B",
    "gemma-7b": "7B",
    "gemma-2-2b": "2B",
    "gemma-3-270m": "270M",
    "phi-1.5": "1.3B",
    "phi-2": "2.7B",
    "phi-4": "14B",
    "smollm2-360m": "360M",
    "palm-540b": "540.35B",
    "mpt-7b": "6.7B",
    "mpt-7b-storywriter": "6.7B",
    "mpt-30b": "29.95B",
    "pythia-160m": "160M",
    "pythia-410m": "410M",
    "gpt-neox-20b": "20B",
    "opt-350m": "350M",
}
"""Presets whose exact count does not round to the printed count."""


@pytest.mark.parametrize("name", NAMES)
def test_count_is_exact(name: str) -> None:
    assert count_parameters(preset(name))["total"] == find_preset(name).parameters


@pytest.mark.parametrize("name", NAMES)
def test_count_rounds_to_the_printed_one_or_the_notes_say_why_not(name: str) -> None:
    found = find_preset(name)
    if name in CONTRADICTIONS:
        assert found.agrees is False
        assert any(CONTRADICTIONS[name].removesuffix("B") in note for note in found.notes)
    else:
        assert found.agrees or not found.printed


def test_presets_without_a_printed_count_are_few() -> None:
    silent = [name for name, found in presets().items() if not found.printed]
    assert silent == ["gpt", "transformer-2017", "transformer-2017-big"]


@pytest.mark.parametrize("name", NAMES)
def test_config_round_trips(name: str) -> None:
    config = preset(name)
    assert DecoderConfig.from_yaml(config.to_yaml()) == config
    assert DecoderConfig.from_json(config.to_json()) == config


def test_the_registry_lists_each_preset_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {name: found.name for name, found in presets().items()} == {name: name for name in NAMES}


def test_every_preset_names_its_source() -> None:
    assert all(len(found.source) > 10 for found in presets().values())


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(WorkhorseError, match=r"no preset 'lama-7b'; did you mean 'llama-7b'\?"):
        preset("lama-7b")


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from workhorse.models import preset_names; preset_names(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("printed", "low", "high"),
    [("6.7B", 6.65e9, 6.75e9), ("125M", 124.5e6, 125.5e6), ("540.35B", 540.345e9, 540.355e9)],
)
def test_rounding(printed: str, low: float, high: float) -> None:
    assert rounding(printed) == pytest.approx((low, high), rel=1e-12)


def test_a_config_is_built_when_it_is_looked_at_and_kept() -> None:
    made: list[int] = []

    def make() -> DecoderConfig:
        made.append(1)
        return preset("gpt2")

    found = Preset("x", make, parameters=1, exactness="derived", source="a test")
    assert not made
    assert found.config is found.config
    assert len(made) == 1


# Claims in the notes.


@pytest.mark.parametrize(
    ("name", "changes", "claimed"),
    [
        ("gpt3-1.3b", {"n_heads": 16}, "1.316B"),
        ("gpt3-13b", {"d_model": 5120, "d_ff": 20480}, "12.85B"),
        ("olmo-65b", {"d_ff": 21888}, "65.33B"),
    ],
)
def test_the_shape_that_would_agree(name: str, changes: dict[str, int], claimed: str) -> None:
    found = find_preset(name)
    data = found.config.to_dict()
    data["d_model"] = changes.get("d_model", data["d_model"])
    for block in data["blocks"].values():
        block["attention"]["n_heads"] = changes.get("n_heads", block["attention"]["n_heads"])
        block["feed_forward"]["d_ff"] = changes.get("d_ff", block["feed_forward"]["d_ff"])
    total = count_parameters(DecoderConfig.from_dict(data))["total"]
    assert replace(found, parameters=total).agrees
    low, high = rounding(claimed)
    assert low <= total <= high
    assert any(claimed in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "printed"), [("gemma-2b", 2_506_434_560), ("gemma-7b", 8_538_074_112)]
)
def test_gemma_with_the_reports_vocabulary_equals_its_table(name: str, printed: int) -> None:
    assert count_parameters(preset(name).replace(vocab_size=256_128))["total"] == printed


@pytest.mark.parametrize("name", ["palm-8b", "palm-62b", "palm-540b"])
def test_palm_counts_without_norms(name: str) -> None:
    counts = count_parameters(preset(name))
    low, high = rounding(find_preset(name).printed)
    assert low <= counts["total"] - counts["norms"] <= high


def test_palm_with_a_vocabulary_of_two_to_the_18th_would_not_agree() -> None:
    low, high = rounding("8.63B")
    total = count_parameters(preset("palm-8b").replace(vocab_size=2**18))["total"]
    assert not low <= total <= high


@pytest.mark.parametrize(
    ("name", "d", "d_ff", "whole"),
    [("transformer-2017", 512, 2048, 63.0e6), ("transformer-2017-big", 1024, 4096, 214.2e6)],
)
def test_the_2017_decoder_with_its_encoder(name: str, d: int, d_ff: int, whole: float) -> None:
    attention, feed_forward, norm = 4 * d * d, 2 * d * d_ff + d_ff + d, 2 * d
    encoder = 6 * (attention + feed_forward + 2 * norm)
    to_encoder = 6 * (attention + norm)
    total = find_preset(name).parameters + encoder + to_encoder
    assert math.isclose(total, whole, abs_tol=0.05e6)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("falcon-7b", 7_217_189_760),
        ("falcon-40b", 41_835_970_560),
        ("falcon-180b", 179_522_565_120),
    ],
)
def test_falcon_files_hold_the_head_twice(name: str, stored: int) -> None:
    assert count_parameters(preset(name).replace(head={"tied": False}))["total"] == stored
    assert any(f"{stored:,}" in note for note in find_preset(name).notes)


@pytest.mark.parametrize(
    ("name", "embedding", "others"),
    [
        ("gemma-2-9b", "918M", "8324M"),
        ("gemma-2-27b", "1180M", "26047M"),
        ("gemma-3-1b", "302M", "698M"),
    ],
)
def test_newer_gemmas_by_their_reports_tables(name: str, embedding: str, others: str) -> None:
    counts = count_parameters(preset(name))
    low, high = rounding(embedding)
    assert low <= counts["embedding"] <= high
    low, high = rounding(others)
    assert low <= counts["total"] - counts["embedding"] <= high


# Mixtures: parameters active per token.


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("mixtral-8x7b", "12.9B"),
        ("mixtral-8x22b", "39B"),
        ("deepseek-v2", "21B"),
        ("qwen3-235b-a22b", "22B"),
        ("olmoe-1b-7b", "1.3B"),
    ],
)
def test_active_parameters_round_to_the_printed_ones(name: str, printed: str) -> None:
    low, high = rounding(printed)
    assert low <= active_parameters(preset(name)) <= high


@pytest.mark.parametrize(("name", "printed"), [("gpt-oss-20b", "3.61B"), ("gpt-oss-120b", "5.13B")])
def test_active_parameters_of_gpt_oss_without_its_embedding(name: str, printed: str) -> None:
    low, high = rounding(printed)
    config = preset(name)
    assert low <= active_parameters(config) - config.vocab_size * config.d_model <= high


def test_all_parameters_of_a_dense_model_are_active() -> None:
    assert active_parameters(preset("gpt2")) == find_preset("gpt2").parameters
