"""OPT (2205.01068)."""

from workhorse.models.families.released.release import Release
from workhorse.models.preset import Preset

opt = Release(
    "opt",
    "2205.01068 Table 1; the released config.json",
    vocab_size=50272,
    max_position_embeddings=2048,
    activation_function="relu",
    dropout=0.1,
    attention_dropout=0.0,
    do_layer_norm_before=True,
)


def size(name: str, parameters: int, width: int, depth: int, heads: int, *, printed: str) -> Preset:
    """Make the preset of one size of OPT; its feed-forward has width 4 · `width`."""
    return opt(
        name,
        parameters,
        printed=printed,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        word_embed_proj_dim=width,
    )


PRESETS = (
    size("opt-125m", 125_239_296, 768, 12, 12, printed="125M"),
    opt(
        "opt-350m",
        331_196_416,
        printed="350M",
        notes=(
            "Named 350M; it has 331.2M. Only this size is post-norm, with an embedding narrower "
            "than the model.",
        ),
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        ffn_dim=4096,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    ),
    size("opt-1.3b", 1_315_758_080, 2048, 24, 32, printed="1.3B"),
    size("opt-2.7b", 2_651_596_800, 2560, 32, 32, printed="2.7B"),
    size("opt-6.7b", 6_658_473_984, 4096, 32, 32, printed="6.7B"),
    size("opt-13b", 12_853_473_280, 5120, 40, 40, printed="13B"),
    size("opt-30b", 29_974_540_288, 7168, 48, 56, printed="30B"),
    size("opt-66b", 65_719_701_504, 9216, 64, 72, printed="66B"),
)
