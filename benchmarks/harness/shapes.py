"""Measured model shapes, and their computed costs: parameters, operations, bytes.

Training shapes are GPT-2's architecture (learned positions, LayerNorm, GELU, tied head) without
biases or dropout. Decoding shapes are LLaMA's (rotary positions, RMSNorm, SwiGLU, an untied head).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, and the batch size for which it is measured."""

    name: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_ff: int
    vocab_size: int
    context: int
    """For training: tokens in a row. For decoding: capacity for the prompt and the new tokens."""
    batch: int
    gated: bool

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """The matrices that every token is multiplied by: (rows, columns, count).

        Matrices that read the same input are joined (queries, keys and values; gate and up). That
        is the fastest way to compute them, and so a fair limit.
        """
        width, head_dim = self.d_model, self.d_model // self.n_heads
        qkv = width + 2 * self.n_kv_heads * head_dim
        return [
            (qkv, width, self.n_layers),
            (width, width, self.n_layers),
            ((2 if self.gated else 1) * self.d_ff, width, self.n_layers),
            (width, self.d_ff, self.n_layers),
            (self.vocab_size, width, 1),
        ]

    @property
    def product_weights(self) -> int:
        """Number of elements of those matrices, which decoding one token must read."""
        return sum(rows * columns * count for rows, columns, count in self.products)

    @property
    def training_flops(self) -> float:
        """Floating-point operations per token of training.

        Six for each weight of a matmul (forward and both gradients), and the whole square of
        attention's scores, as PaLM counts (2204.02311, appendix B). A causal kernel is credited
        with the scores that it skips.
        """
        return 6.0 * self.product_weights + 12.0 * self.n_layers * self.d_model * self.context

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of the matmuls per token of a prompt.

        The head is not counted: only the last token of a prompt needs it.
        """
        return 2.0 * (self.product_weights - self.vocab_size * self.d_model)


def _gpt(
    name: str, n_layers: int, n_heads: int, width: int, vocab: int, *, context: int, batch: int
) -> Shape:
    return Shape(
        name, n_layers, n_heads, n_heads, width, 4 * width, vocab, context, batch, gated=False
    )


def _llama(name: str, n_layers: int, heads: tuple[int, int], width: int, d_ff: int) -> Shape:
    return Shape(name, n_layers, *heads, width, d_ff, 32_000, 2048, 1, gated=True)


TRAINING = {
    shape.name: shape
    for shape in (
        _gpt("tiny", 4, 4, 128, 65, context=64, batch=12),
        _gpt("baby", 6, 6, 384, 65, context=256, batch=16),
        _gpt("gpt2", 12, 12, 768, 50_304, context=512, batch=2),
    )
}
DECODING = {
    shape.name: shape
    for shape in (
        _llama("160m", 12, (12, 12), 768, 2048),
        _llama("1b", 22, (32, 4), 2048, 5632),
    )
}
TUNING = {shape.name: shape for shape in (_llama("25m", 10, (4, 4), 256, 768), DECODING["160m"])}
"""Shapes of models that are fine-tuned, on rows of `TUNING_TOKENS` tokens."""
TUNING_TOKENS = 512
STORED = {
    shape.name: shape
    for shape in (
        TUNING["25m"],
        _llama("20m", 8, (6, 2), 384, 1024),
        DECODING["160m"],
        _gpt("gpt2", 12, 12, 768, 50_304, context=1024, batch=1),
        _llama("350m", 22, (16, 16), 1024, 2816),
        DECODING["1b"],
    )
}
"""Shapes for measuring loading, in bfloat16: 73 MiB to 2 GiB. GPT-2's matrices are stored
transposed and joined; the other models' are stored as they are used."""

PROMPT_TOKENS = 128
NEW_TOKENS = 64

DTYPES = ("float32", "bfloat16")
PRECISIONS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "q8_0",
    "int4": "q4_0",
}
"""Our precision, and llama.cpp's type with the same number of bits per weight."""
BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "int8": 8.5,
    "int4": 4.5,
}
"""Bits per weight of our precisions, including scales: one float16 for 32 weights."""
