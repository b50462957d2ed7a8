"""Pythia (2304.01373) and GPT-NeoX-20B (2204.06745)."""

from typing import Any

from workhorse.models.families.released.release import Release
from workhorse.models.preset import Preset

SHARED: dict[str, Any] = {
    "rotary_pct": 0.25,
    "rotary_emb_base": 10_000,
    "use_parallel_residual": True,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
pythia = Release(
    "gpt_neox",
    "2304.01373 Table 1; the released config.json",
    hidden_act="gelu",
    **SHARED,
)
neox = Release(
    "gpt_neox",
    "2204.06745 §2; the released config.json",
    hidden_act="gelu_fast",
    **SHARED,
)


def size(
    name: str,
    parameters: int,
    width: int,
    depth: int,
    heads: int,
    *,
    vocab_size: int = 50304,
    printed: str = "",
    notes: tuple[str, ...] = (),
) -> Preset:
    """Make the preset of one size of Pythia; its feed-forward has width 4 · `width`."""
    return pythia(
        name,
        parameters,
        printed=printed,
        notes=notes,
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )


PRESETS = (
    size("pythia-70m", 70_426_624, 512, 6, 8, printed="70M"),
    size(
        "pythia-160m",
        162_322_944,
        768,
        12,
        12,
        printed="160M",
        notes=("Named 160M; it has 162.3M.",),
    ),
    size(
        "pythia-410m",
        405_334_016,
        1024,
        24,
        16,
        printed="410M",
        notes=("Named 410M; it has 405.3M.",),
    ),
    size("pythia-1b", 1_011_781_632, 2048, 16, 8, printed="1.0B"),
    size("pythia-1.4b", 1_414_647_808, 2048, 24, 16, printed="1.4B"),
    size("pythia-2.8b", 2_775_208_960, 2560, 32, 32, printed="2.8B"),
    size("pythia-6.9b", 6_857_302_016, 4096, 32, 32, vocab_size=50432, printed="6.9B"),
    size(
        "pythia-12b",
        11_846_072_320,
        5120,
        36,
        40,
        vocab_size=50688,
        printed="12B",
    ),
    neox(
        "gpt-neox-20b",
        20_554_567_680,
        printed="20B",
        notes=("Named 20B; it has 20.55B.",),
        vocab_size=50432,
        hidden_size=6144,
        num_hidden_layers=44,
        num_attention_heads=64,
        intermediate_size=24576,
    ),
)
