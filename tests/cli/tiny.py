"""A recipe that is small enough to be trained in a test."""

RECIPE = """
name: tiny
model:
  d_model: 16
  n_layers: 1
  blocks:
    main:
      kind: pre_norm
      norm: {kind: rms_norm}
      attention: {kind: attention, n_heads: 2, position: {kind: rope}}
      feed_forward: {kind: mlp, d_ff: 32, activation: gelu}
  head: {tied: true}
tokenizer: {kind: bytes}
data:
  corpus: {kind: text, path: corpus.txt}
train: {steps: 6, batch_size: 2, seq_len: 16, log_every: 2}
"""
SMALL_GPT2 = (
    "model={preset: gpt2, n_layers: 1, d_model: 16, blocks: {main: "
    "{attention: {n_heads: 2}, feed_forward: {d_ff: 32}}}}"
)
