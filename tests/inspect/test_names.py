"""TransformerLens's names: their layouts, edits and gradients."""

import torch

from workhorse.inspect import trace
from workhorse.nn import DecoderConfig

CONFIG = """
vocab_size: 20
d_model: 16
n_layers: 2
max_seq_len: 16
blocks:
  main:
    norm: {kind: layer_norm}
    attention: {n_heads: 4, n_kv_heads: 2, sinks: true, position: {kind: rope}}
    feed_forward: {kind: gated_mlp, d_ff: 12}
    kind: pre_norm
final_norm: {kind: rms_norm}
"""
SHAPES = {
    "hook_embed": (2, 5, 16),
    "blocks.0.hook_resid_mid": (2, 5, 16),
    "blocks.1.ln1.hook_normalized": (2, 5, 16),
    "blocks.1.attn.hook_q": (2, 5, 4, 4),
    "blocks.1.attn.hook_k": (2, 5, 2, 4),
    "blocks.1.attn.hook_rot_k": (2, 5, 2, 4),
    "blocks.1.attn.hook_z": (2, 5, 4, 4),
    "blocks.1.attn.hook_attn_scores": (2, 4, 5, 5),  # without the sinks
    "blocks.1.mlp.hook_pre": (2, 5, 12),
    "ln_final.hook_normalized": (2, 5, 16),
    "unembed.hook_out": (2, 5, 20),
}


def test_layouts_edits_and_gradients() -> None:
    torch.manual_seed(0)
    decoder = DecoderConfig.from_yaml(CONFIG).build(dtype=torch.float64)
    for parameter in decoder.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tokens = torch.randint(20, (2, 5))
    run = trace(decoder, tokens, gradients=True)
    assert "blocks.2.hook_resid_pre" not in run
    assert f"blocks.{'9' * 5000}.hook_resid_pre" not in run
    for name, shape in SHAPES.items():
        assert name in run
        assert run[name].shape == shape
        same = trace(decoder, tokens, edits={name: run[name].detach()})
        assert torch.allclose(same.logits, run.logits, atol=1e-5)
        other = trace(decoder, tokens, edits={name: lambda x: x + torch.ones_like(x).triu()})
        assert not torch.allclose(other.logits, run.logits, atol=1e-3)
        # The gradient predicts the effect of a small edit.
        step = 1e-4 * torch.randn(shape).to(run[name])
        moved = trace(decoder, tokens, edits={name: lambda x, step=step: x + step})
        scalar = run.logits[0, -1].sum()
        gradient = run.gradients(scalar, [name])[name]
        error = moved.logits[0, -1].sum() - scalar - (gradient * step).sum()
        assert error.abs() < 0.01 * gradient.norm() * step.norm()
