"""GPT-2 and LLaMA written from their formulas in float64 numpy, compared with `nn`.

They share no code with `nn`: explicit loops over heads and positions, one row at a time.
"""

import numpy as np
import pytest

from tests.nn.grid import make, random_tokens
from workhorse.nn import Decoder, DecoderConfig

SEQ = 9


def weights_of(decoder: Decoder) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in decoder.state_dict().items()}


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One head: `(seq, head_dim)` queries, keys and values."""
    y = np.zeros_like(v)
    for i in range(len(q)):
        weights = softmax(np.array([q[i] @ k[j] for j in range(i + 1)]) / np.sqrt(q.shape[1]))
        y[i] = sum(weight * v[j] for j, weight in enumerate(weights))
    return y


GPT2 = {
    "vocab_size": 29,
    "d_model": 12,
    "n_layers": 2,
    "max_seq_len": 16,
    "embedding": {"position": {"kind": "learned"}},
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "layer_norm"},
            "attention": {"n_heads": 3, "qkv_bias": True, "out_bias": True},
            "feed_forward": {"kind": "mlp", "d_ff": 48, "activation": "gelu_tanh", "bias": True},
        }
    },
    "final_norm": {"kind": "layer_norm"},
    "head": {"tied": True},
}


def gpt2(w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Language Models are Unsupervised Multitask Learners, §2.3."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = x.mean(axis=-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embedding.tokens.weight"][tokens]
    x = x + w["embedding.positions.table.weight"][: len(tokens)]
    for layer in range(2):
        at = f"layers.{layer}"
        normed = norm(x, f"{at}.attention_norm")
        q, k, v = (linear(normed, f"{at}.attention.{part}_proj") for part in "qkv")
        heads = [causal_attention(q[:, h], k[:, h], v[:, h]) for h in np.split(np.arange(12), 3)]
        x = x + linear(np.concatenate(heads, axis=-1), f"{at}.attention.out_proj")
        hidden = linear(norm(x, f"{at}.feed_forward_norm"), f"{at}.feed_forward.up_proj")
        cube = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
        x = x + linear(0.5 * hidden * (1 + np.tanh(cube)), f"{at}.feed_forward.down_proj")
    return norm(x, "final_norm") @ w["embedding.tokens.weight"].T


LLAMA = {
    "vocab_size": 29,
    "d_model": 16,
    "n_layers": 2,
    "max_seq_len": 16,
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "rms_norm", "eps": 1e-6},
            "attention": {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}},
            "feed_forward": {"kind": "gated_mlp", "d_ff": 40, "activation": "silu"},
        }
    },
    "final_norm": {"kind": "rms_norm", "eps": 1e-6},
}


def llama(w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """LLaMA, 2302.13971 §2.2: pre-norm with RMSNorm, SwiGLU, RoPE; grouped-query as in LLaMA-2."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        """Rows are positions; feature i and feature i + 2 form the complex number a + bi."""
        angle = np.arange(len(x))[:, None] * 10_000.0 ** (-2 * np.arange(2) / 4)
        z = (x[:, :2] + 1j * x[:, 2:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], axis=-1)

    x = w["embedding.tokens.weight"][tokens]
    for layer in range(2):
        at = f"layers.{layer}"
        normed = norm(x, f"{at}.attention_norm")
        q, k, v = (normed @ w[f"{at}.attention.{part}_proj.weight"].T for part in "qkv")
        heads = []
        for head in range(4):
            own, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
            heads.append(causal_attention(turned(q[:, own]), turned(k[:, shared]), v[:, shared]))
        x = x + np.concatenate(heads, axis=-1) @ w[f"{at}.attention.out_proj.weight"].T
        normed = norm(x, f"{at}.feed_forward_norm")
        gate = normed @ w[f"{at}.feed_forward.gate_proj.weight"].T
        up = normed @ w[f"{at}.feed_forward.up_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * up
        x = x + hidden @ w[f"{at}.feed_forward.down_proj.weight"].T
    return norm(x, "final_norm") @ w["head.proj.weight"].T


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(("data", "formula"), [(GPT2, gpt2), (LLAMA, llama)], ids=["gpt2", "llama"])
def test_a_decoder_is_its_formula(data: dict, formula, kernel: str) -> None:
    decoder = make(DecoderConfig.from_dict(data), kernel)
    tokens = random_tokens(decoder.config, 2, SEQ)
    logits = decoder(tokens).detach().double().numpy()
    for row in range(2):
        expected = formula(weights_of(decoder), tokens[row].numpy())
        assert np.abs(logits[row] - expected).max() <= 1e-5
