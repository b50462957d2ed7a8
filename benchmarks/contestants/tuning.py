"""Workhorse's steps of fine-tuning, built by the functions that `workhorse train` uses."""

from typing import Any

import torch

from benchmarks.contestants.ours import keep_memory
from benchmarks.contestants.training import BETAS, GRAD_CLIP, LEARNING_RATE, WARM_UP, WEIGHT_DECAY
from benchmarks.harness.limits import seconds_of
from benchmarks.harness.models import huggingface_folder
from benchmarks.harness.shapes import TUNING, TUNING_TOKENS
from benchmarks.harness.worker import Round

RANK, ALPHA = 16, 32
DEVICE = torch.device("cpu")


def train(*, shape: str, dtype: str, method: str, rows: int, models: str, threads: int) -> Round:
    """Rounds of one step."""
    from workhorse.checkpoints import weights_of
    from workhorse.checkpoints.adapted import AdapterConfig
    from workhorse.checkpoints.stored import open_stored
    from workhorse.devices.names import training_dtype
    from workhorse.train.recipe.training import TrainConfig
    from workhorse.train.step.build import build_step

    torch.set_num_threads(threads)
    config = TrainConfig.from_dict(
        {
            "steps": 1_000_000,
            "seq_len": TUNING_TOKENS,
            "batch_size": rows,
            "dtype": dtype,
            "grad_clip": GRAD_CLIP,
            "objective": {"kind": "dpo" if method == "dpo" else "next_token"},
            "optimizer": {
                "kind": "adamw",
                "learning_rate": LEARNING_RATE,
                "beta1": BETAS[0],
                "beta2": BETAS[1],
                "weight_decay": WEIGHT_DECAY,
            },
        }
    )
    keep_memory(DEVICE)
    stored = open_stored(str(huggingface_folder(shape, models)))
    decoder = stored.load_decoder(dtype=torch.float32)
    if method in ("lora", "qlora"):
        lora: dict[str, Any] = {"rank": RANK, "alpha": ALPHA}
        adapter = AdapterConfig(**lora, quantize="int4" if method == "qlora" else None)
        weights = weights_of(decoder).items()
        form = training_dtype(dtype, DEVICE)
        decoder = adapter.trainable(decoder.config, config.kernel, DEVICE, form, weights)
        del weights
    step = build_step(decoder.train(), config, DEVICE)
    torch.manual_seed(0)
    tokens = torch.randint(TUNING[shape].vocab_size, (rows, TUNING_TOKENS))
    batch = config.objective.synthetic(tokens)

    def take() -> None:
        step.update(*step.backward(batch), schedule=1.0)

    for _ in range(WARM_UP):
        take()
    return lambda: {"tokens": rows * TUNING_TOKENS / seconds_of(take, "cpu")}
