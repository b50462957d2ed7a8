"""Write `docs/accounting.md`: figures of `workhorse plan` and measured training steps.

python -m tests.plan.accounting [--out docs/accounting.md] [MODEL ...]

The models are the first small shape of every supported model type and every config of the covering
grid, each made wider. The training settings cycle through precisions, kernels, checkpointing,
micro-batches and optimizers. Two of three models run with the native operators, the others only
with PyTorch's operators, in a separate process.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.nn.grid import COVERING
from tests.parity.all_cases import ALL
from tests.plan import measure
from tests.plan.measure import CPU
from workhorse.memory.model_memory import cache_of_layers
from workhorse.memory.step_memory import PlannedStep, step_memory
from workhorse.models.describe import count_parameters, forward_flops
from workhorse.models.huggingface import Fields, family
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.train.recipe.training import TrainConfig

ROWS, SEQ = 4, 48
FAMILY_TIMES, GRID_TIMES, ODD_TIMES = 4, 8, 5
"""Factors on the widths of other tests, so that workspaces of operators are relatively small."""
WIDTHS = {
    *("d_model", "d_ff", "vocab_size", "width", "head_dim", "value_dim"),
    *("q_rank", "kv_rank", "nope_dim", "rope_dim"),
}
TRAININGS = [
    {
        "dtype": dtype,
        "kernel": kernel,
        "activation_checkpointing": checkpointing,
        "micro_batch_size": rows,
        "optimizer": {"kind": optimizer, "learning_rate": 1e-3},
    }
    for optimizer, dtype, kernel, checkpointing, rows in product(
        ("adamw", "muon"), ("float32", "bfloat16"), ("auto", "eager"), (False, True), (None, 2)
    )
]
QUANTITIES = ("parameters", "operations", "activations", "cache", "peak")


@dataclass(frozen=True)
class Case:
    """A model and its training settings."""

    name: str
    config: DecoderConfig
    train: TrainConfig
    native: bool


@dataclass(frozen=True)
class Row:
    """Predicted and measured figures of a case; the cache is None without causal attention."""

    name: str
    setting: str
    predicted: dict[str, int | None]
    measured: dict[str, int | None]

    def difference(self, quantity: str) -> float:
        """Relative difference between prediction and measurement."""
        predicted, measured = self.predicted[quantity], self.measured[quantity]
        return (predicted or 0) / measured - 1 if measured else 0.0


def cases() -> Iterator[Case]:
    for number, (name, config) in enumerate(models()):
        train = TrainConfig(
            steps=1,
            batch_size=ROWS,
            seq_len=min(SEQ, config.max_seq_len),
            **TRAININGS[5 * number % len(TRAININGS)],
        )
        yield Case(name, config, train, native=number % 3 != 2)


def models() -> Iterator[tuple[str, DecoderConfig]]:
    for model_type, shapes in ALL.items():
        config = family(model_type).read(Fields({"vocab_size": 67, **shapes[0]}))
        yield model_type, wider(config, FAMILY_TIMES)
    for number, config in enumerate(COVERING):
        odd = config.d_model % 2
        yield f"grid {number}{', odd' * odd}", wider(config, ODD_TIMES if odd else GRID_TIMES)


def wider(config: DecoderConfig, times: int) -> DecoderConfig:
    """The config with every width multiplied by `times`."""
    return DecoderConfig.from_dict(_wider(config.to_dict(), times))


def _wider(data: Any, times: int) -> Any:
    if isinstance(data, dict):
        return {
            key: value * times
            if key in WIDTHS and isinstance(value, int)
            else None  # LongRoPE has a factor for each pair of features
            if key == "scaling" and value and value["kind"] == "longrope"
            else _wider(value, times)
            for key, value in data.items()
        }
    return [_wider(value, times) for value in data] if isinstance(data, list | tuple) else data


def account(case: Case) -> Row:
    config, train = case.config, case.train
    torch.manual_seed(0)
    decoder = config.build("eager")
    one_batch = train.replace(batch_size=train.micro_batch_size or train.batch_size)
    kept = measure.kept_by_autograd(config, one_batch)
    kept.pop("head", None)  # the head computes its gradient in the forward pass
    memory = step_memory(PlannedStep(config, train, CPU))
    constants = memory.timeline["temporary"][0]  # tables of activation functions, built once
    causal = all(block.attention.causal for block in config.blocks.values())
    flops = 3 * (sum(forward_flops(decoder, train.seq_len).values()) + hidden(decoder, train))
    layers = cache_of_layers(config, torch.float32) if causal else []
    predicted = {
        "parameters": count_parameters(config)["total"],
        "operations": flops * ROWS * train.seq_len,
        "activations": sum(memory.activations.values()),
        "cache": sum(layer.bytes_per_token for layer in layers) if causal else None,
        "peak": max(memory.totals) - constants,
    }
    measured = {
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "operations": measure.counted_by_pytorch(decoder, measure.random_batch(config, train)),
        "activations": sum(kept.values()),
        "cache": measure.cache_bytes_per_token(decoder) if causal else None,
        "peak": measure.most_allocated(config, train),
    }
    return Row(case.name, setting(case), predicted, measured)


def hidden(decoder: Decoder, train: TrainConfig) -> int:
    """Operations on keys hidden by windows and chunks; only PyTorch's counter counts these."""
    return sum(
        2 * layer.n_heads * (layer.head_dim + layer.value_dim) * (train.seq_len - reach)
        for layer in decoder.modules()
        if isinstance(layer, SelfAttention)
        for reach in [min(train.seq_len, layer.pattern.reach or train.seq_len)]
    )


def setting(case: Case) -> str:
    train = case.train
    said = [train.dtype, train.kernel, train.optimizer.kind]
    said += ["checkpointing"] * train.activation_checkpointing
    said += [f"{train.micro_batch_size} rows at once"] * (train.micro_batch_size is not None)
    return ", ".join([*said, "native" if case.native else "PyTorch"])


def measure_all(only: list[str], notify: Any = lambda line: None) -> list[Row]:
    """Measure all rows, in two processes one after the other."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for native in (True, False):
            found = Path(folder, f"{native}.jsonl")
            environment = {**os.environ, "WORKHORSE_NATIVE": str(int(native))}
            here = [sys.executable, "-m", "tests.plan.accounting", *only, "--rows", str(found)]
            subprocess.run(here, env=environment, check=True, stdout=subprocess.DEVNULL)
            rows += [Row(**json.loads(line)) for line in found.read_text().splitlines()]
            notify(f"{len(rows)} rows")
    order = [case.name for case in cases()]
    return sorted(rows, key=lambda row: order.index(row.name))


HEADING = """\
# Accounting: predicted and measured

Predictions of `workhorse plan` for a training step, compared with a real step on a CPU, for {count}
models and settings (PyTorch {torch}). Made by `python -m tests.plan.accounting --out
docs/accounting.md`; `make campaign-accounting` checks the bounds. {native} run with native
operators, {plain} only with PyTorch's. `kernel: flex` has no row: it does not train on a CPU.

| quantity | measured by | largest difference |
|---|---|---|
{summary}

- **operations**: PyTorch's counter, forward and backward, on the kernel `eager`. The counter
  includes keys that windows and chunks mask; these are added to our count here, and nothing else
  is. The counter does not know the grouped matmul of experts, so the tests register it. Neither
  count includes recomputation by checkpointing.
- **activations**: saved-tensor hooks. Each storage counts once if autograd still has it at the end
  of the forward pass. Tensors that checkpointing keeps in closures count too. The state of the
  random generator, 5,056 bytes per layer, is excluded, as in `plan`.
- **cache**: the paged cache, all layers, in float32.
- **peak**: PyTorch's own record of its CPU allocator during the second step. The prediction omits
  memory that operators allocate and free internally: for most rows oneDNN's copies of matrices in
  the order in which it multiplies them. Such a copy is as large as one matrix, so the difference
  gets smaller with more layers.

"""
COLUMNS = (
    *("model", "setting", "parameters", "operations", "activations", "cache per token"),
    *("peak, predicted", "measured", "difference"),
)
NAMES = {
    "parameters": "the built model",
    "operations": "PyTorch's flop counter",
    "activations": "saved-tensor hooks",
    "cache": "the allocated cache",
    "peak": "the allocator's record",
}


def as_markdown(rows: list[Row]) -> str:
    native = sum(row.setting.endswith("native") for row in rows)
    heading = HEADING.format(
        count=len(rows),
        torch=torch.__version__.partition("+")[0],
        native=native,
        plain=len(rows) - native,
        summary="\n".join(_summary(rows, quantity) for quantity in QUANTITIES),
    )
    table = [_joined(COLUMNS), "|---|---|" + "---:|" * len(COLUMNS[2:]), *map(_line, rows)]
    return heading + "\n".join(table) + f"\n\nMeasured on {_cpu()}.\n"


def _summary(rows: list[Row], quantity: str) -> str:
    worst = max(rows, key=lambda row: abs(row.difference(quantity)))
    off = worst.difference(quantity)
    where = f"{off:+.1%} ({worst.name})" if off else "none"
    return f"| {quantity} | {NAMES[quantity]} | {where} |"


def _line(row: Row) -> str:
    cells = [row.name, row.setting]
    for quantity in QUANTITIES[:-1]:
        predicted, off = row.predicted[quantity], row.difference(quantity)
        number = "" if predicted is None else f"{predicted:,}"
        cells.append(number + f" ({off:+.2%})" * bool(off))
    cells += [f"{one['peak']:,}" for one in (row.predicted, row.measured)]
    return _joined([*cells, f"{row.difference('peak'):+.1%}"])


def _joined(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("only", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path, help="file for the rows of this process")
    given = parser.parse_args()
    if given.rows is None:
        text = as_markdown(measure_all(given.only))
        print(text) if given.out is None else given.out.write_text(text)
        return
    native = os.environ["WORKHORSE_NATIVE"] == "1"
    with given.rows.open("w") as file:
        for case in cases():
            if case.native == native and (not given.only or case.name in given.only):
                print(json.dumps(asdict(account(case))), file=file, flush=True)


if __name__ == "__main__":
    main()
