"""Hugging Face transformers: GPT-2 (which always has biases) for training, LLaMA for decoding."""

import torch
import transformers

from benchmarks.contestants.training import batch, fused_adamw, plain_step, rounds
from benchmarks.harness.models import huggingface_folder
from benchmarks.harness.shapes import DECODING, TRAINING
from benchmarks.harness.tokens import TokenClock, random_tokens
from benchmarks.harness.worker import Round


def train(*, shape: str, dtype: str, device: str, threads: int) -> Round:
    """Rounds of training steps."""
    sizes = TRAINING[shape]
    tokens, targets = batch(shape, device, threads)
    config = transformers.GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.context,
        n_embd=sizes.d_model,
        n_layer=sizes.n_layers,
        n_head=sizes.n_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config).to(device).train()

    def loss() -> torch.Tensor:
        # The targets are shifted already.
        return model(tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    return rounds(shape, plain_step(model, fused_adamw(model), loss, dtype, device), device)


def generate(
    *,
    shape: str,
    precision: str,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    models: str,
    device: str,
    threads: int,
) -> Round:
    """Rounds of greedy decoding, with the cache that `generate` chooses."""
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        huggingface_folder(shape, models), dtype=getattr(torch, precision)
    ).to(device)
    model.generation_config.eos_token_id = None
    rows = random_tokens(batch, prompt_tokens, DECODING[shape].vocab_size)
    prompts = torch.tensor(rows, device=device)

    def take() -> dict[str, float]:
        clock = TokenClock(batch, prompt_tokens)
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=_Streamer(clock),
        )
        return clock.rates(new_tokens)

    take()
    return take


class _Streamer(transformers.generation.streamers.BaseStreamer):
    """Ticks the clock for each new token; the first call is the prompt and is skipped."""

    def __init__(self, clock: TokenClock) -> None:
        self._clock, self._is_prompt = clock, True

    def put(self, value: torch.Tensor) -> None:
        del value
        if not self._is_prompt:
            self._clock.tick()
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing."""
