"""BLOOM (2211.05100)."""

from workhorse.models.families.released.release import Release
from workhorse.models.preset import Preset

bloom = Release(
    "bloom",
    "2211.05100 Table 3; the released config.json",
    vocab_size=250_880,
    seq_length=2048,
    layer_norm_epsilon=1e-5,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    apply_residual_connection_post_layernorm=False,
)


def size(name: str, parameters: int, width: int, depth: int, heads: int, *, printed: str) -> Preset:
    """Make the preset of one size of BLOOM; its feed-forward has width 4 · `width`."""
    return bloom(name, parameters, printed=printed, hidden_size=width, n_layer=depth, n_head=heads)


PRESETS = (
    size("bloom-560m", 559_214_592, 1024, 24, 16, printed="559M"),
    size("bloom-1b1", 1_065_314_304, 1536, 24, 16, printed="1065M"),
    size("bloom-1b7", 1_722_408_960, 2048, 24, 16, printed="1722M"),
    size("bloom-3b", 3_002_557_440, 2560, 30, 32, printed="3003M"),
    size("bloom-7b1", 7_069_016_064, 4096, 30, 32, printed="7069M"),
    size("bloom-176b", 176_247_271_424, 14336, 70, 112, printed="176247M"),
)
