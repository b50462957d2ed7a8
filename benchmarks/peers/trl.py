"""TRL's trainers, with PEFT's LoRA."""

import tempfile
import time
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

from benchmarks.contestants.training import BETAS, GRAD_CLIP, LEARNING_RATE, WARM_UP, WEIGHT_DECAY
from benchmarks.contestants.tuning import ALPHA, RANK
from benchmarks.harness.models import huggingface_folder
from benchmarks.harness.shapes import TUNING, TUNING_TOKENS
from benchmarks.harness.worker import Round

STEPS = 3
"""Timed steps of a round."""


class _Clock(transformers.TrainerCallback):
    """Records the time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


def train(*, shape: str, dtype: str, method: str, rows: int, models: str, threads: int) -> Round:
    """Rounds of a few steps in TRL's own loop, timed between the ends of steps."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    vocabulary = TUNING[shape].vocab_size
    model = transformers.AutoModelForCausalLM.from_pretrained(
        huggingface_folder(shape, models), dtype=torch.float32
    )
    dpo = method == "dpo"
    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 1 + STEPS,
        "per_device_train_batch_size": rows // 2 if dpo else rows,
        "max_length": TUNING_TOKENS,
        "learning_rate": LEARNING_RATE,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": GRAD_CLIP,
        "bf16": dtype == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1000,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    torch.manual_seed(0)
    count = rows * (1 + STEPS)
    if dpo:
        half = TUNING_TOKENS // 2
        names = {"prompt": half, "chosen": half - 1, "rejected": half - 1}  # eos follows
        config = trl.DPOConfig(**common, precompute_ref_log_probs=True)
        kind: Any = trl.DPOTrainer
    else:
        names = {"input_ids": TUNING_TOKENS}
        config = trl.SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True})
        kind = trl.SFTTrainer
    columns: dict[str, Any] = {
        name: torch.randint(5, vocabulary, (count, length)).tolist()
        for name, length in names.items()
    }
    if dpo:
        columns = {
            name: [" ".join(f"w{number}" for number in row) for row in rows_of]
            for name, rows_of in columns.items()
        }
    options: dict[str, Any] = {}
    if method == "lora":
        import peft

        options["peft_config"] = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    clock = _Clock()
    trainer = kind(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=_tokenizer(vocabulary),
        callbacks=[clock],
        **options,
    )

    def take() -> dict[str, float]:
        clock.times.clear()
        trainer.train()
        seconds = clock.times[-1] - clock.times[0]
        return {"tokens": rows * TUNING_TOKENS * (len(clock.times) - 1) / seconds}

    assert WARM_UP <= STEPS
    take()
    return take


def _tokenizer(vocabulary: int) -> Any:
    words = {f"w{number}": number for number in range(vocabulary)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w1", eos_token="w2", unk_token="w0"
    )
