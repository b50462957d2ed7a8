"""Runs on many devices as `plan` simulates them, and published ones: `python -m studies.scale`.

The first table has runs whose speed others measured, simulated from their sizes alone; the second
what three models would take on 8 to 4,096 H100. Nothing is trained; it takes a minute.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from workhorse.memory.device_memory import device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.models import find_preset
from workhorse.models.describe import forward_flops
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import ParallelismConfig
from workhorse.plan.devices import DeviceConfig, find_device
from workhorse.plan.plan import failures
from workhorse.plan.step_time import StepTime, simulated_step
from workhorse.train.recipe.training import TrainConfig

CUDA = torch.device("cuda")  # none is needed
DAY = 86_400
SHOWN, TEN = 0.005, 10
"""Of a step's time: smaller parts are not shown. Smaller numbers have a decimal."""


class Run(NamedTuple):
    """A run that someone measured.

    Attributes:
        figure: the speed of a device: `TFLOP/s`, with what checkpointing repeats; `% MFU`;
            or `tokens/s`.
        calibrates: whether the device's `reached` is from this run.
    """

    name: str
    source: str
    config: DecoderConfig
    device: DeviceConfig
    train: TrainConfig
    mesh: ParallelismConfig
    figure: str
    published: float
    calibrates: bool = False


def training(rows: int, seq_len: int, **fields: Any) -> TrainConfig:
    """Of a step with so many rows."""
    adamw = {"kind": "adamw", "learning_rate": 1e-3}
    given = {"steps": 1, "batch_size": rows, "seq_len": seq_len, "dtype": "bfloat16"}
    return TrainConfig(**given, **fields, optimizer=adamw)  # pyright: ignore[reportArgumentType]


def gpt(width: int, layers: int, heads: int, vocab: int, seq_len: int) -> DecoderConfig:
    """GPT-3's kind of decoder, which MPT's is but for its norms' biases."""
    norm = {"kind": "layer_norm"}
    block = {
        **{"kind": "pre_norm", "norm": norm},
        "attention": {"n_heads": heads, "qkv_bias": True, "out_bias": True},
        "feed_forward": {"kind": "mlp", "d_ff": 4 * width, "bias": True},
    }
    return DecoderConfig.from_dict(
        {
            **{"vocab_size": vocab, "d_model": width, "n_layers": layers, "max_seq_len": seq_len},
            **{"blocks": {"main": block}, "final_norm": norm, "head": {"tied": True}},
        }
    )


MEGATRON = [  # width, layers, heads, tensor, pipeline, devices, rows, 10^12 FLOP/s of each
    (2304, 24, 24, 1, 1, 32, 512, 137),
    (3072, 30, 32, 2, 1, 64, 512, 138),
    (4096, 36, 32, 4, 1, 128, 512, 142),
    (6144, 40, 48, 8, 1, 256, 1024, 135),
    (8192, 48, 64, 8, 2, 512, 1536, 138),
    (10240, 60, 80, 8, 4, 1024, 1792, 140),
    (12288, 80, 96, 8, 8, 1536, 2304, 148),
    (16384, 96, 128, 8, 16, 1920, 2160, 155),
    (20480, 105, 128, 8, 35, 2520, 2520, 163),
    (25600, 128, 160, 8, 64, 3072, 3072, 163),
]
MPT = {  # width, layers, heads, tokens, devices, rows, rows at once, checkpointing, MFU
    "a100": [
        (4096, 32, 32, 2048, 8, 96, 6, False, 64.23),
        (4096, 32, 32, 8192, 8, 128, 8, True, 54.47),
        (5120, 40, 40, 2048, 8, 48, 2, False, 59.57),
        (7168, 48, 56, 2048, 8, 504, 3, True, 55.30),
        (8192, 80, 64, 2048, 32, 1024, 2, True, 48.56),
        (8192, 80, 64, 2048, 64, 2048, 8, True, 53.33),
    ],
    "h100": [
        (4096, 32, 32, 2048, 8, 48, 6, False, 46.44),
        (4096, 32, 32, 8192, 8, 128, 8, True, 37.14),
        (2048, 24, 16, 2048, 64, 1280, 20, False, 40.85),
        (2560, 32, 20, 2048, 64, 1152, 6, False, 40.80),
        (5120, 40, 40, 2048, 8, 16, 2, False, 39.79),
        (5120, 40, 40, 2048, 64, 128, 2, False, 39.86),
        (7168, 48, 56, 2048, 8, 504, 3, True, 38.11),
        (7168, 48, 56, 2048, 32, 1344, 14, True, 43.92),
        (8192, 80, 64, 2048, 32, 1024, 2, True, 36.15),
        (8192, 80, 64, 2048, 64, 2048, 8, True, 42.57),
    ],
}
"""The first of each device is the one that its `reached` is from."""
LLAMA_405B = [  # data, context, tokens, rows, MFU
    (64, 1, 8192, 2048, 43),
    (128, 1, 8192, 2048, 41),
    (8, 16, 131_072, 128, 38),
]


def published() -> Iterator[Run]:
    """Runs of four papers and pages."""
    a100, h100 = find_device("a100"), find_device("h100")
    for width, layers, heads, tensor, pipeline, devices, rows, rate in MEGATRON:
        config = gpt(width, layers, heads, 51_200, 2048)
        data = devices // (tensor * pipeline)
        train = training(
            rows, 2048, micro_batch_size=1, activation_checkpointing=True, kernel="eager"
        )
        mesh = ParallelismConfig(data=data, tensor=tensor, pipeline=pipeline)
        yield Run("GPT", "2104.04473 table 1", config, a100, train, mesh, "TFLOP/s", rate)
    for device, runs in MPT.items():
        for number, sizes in enumerate(runs):
            width, layers, heads, tokens, devices, rows, at_once, again, mfu = sizes
            config = gpt(width, layers, heads, 50_368, tokens)
            train = training(rows, tokens, micro_batch_size=at_once, activation_checkpointing=again)
            mesh = ParallelismConfig(shard=devices)
            source = f"llm-foundry, {device.upper()}"
            known = find_device(device)
            yield Run("MPT", source, config, known, train, mesh, "% MFU", mfu, number == 0)
    slower = h100.replace(bandwidth=2400)  # as that page says of its devices
    for devices, rate in ((8, 6667), (128, 6514)):
        config = find_preset("llama-3.1-8b").config
        train = training(2 * devices, 8192, micro_batch_size=2)
        mesh = ParallelismConfig(shard=devices)
        yield Run("Llama 3.1", "torchtitan", config, slower, train, mesh, "tokens/s", rate)
    for data, context, tokens, rows, mfu in LLAMA_405B:
        config = find_preset("llama-3.1-405b").config.replace(max_seq_len=tokens)
        mesh = ParallelismConfig(data=data, context=context, tensor=8, pipeline=16)
        train = training(rows, tokens, micro_batch_size=1)
        source = "2407.21783 table 4"
        yield Run("Llama 3.1", source, config, h100, train, mesh, "% MFU", mfu)


def simulated(run: Run) -> tuple[float, StepTime]:
    """The published figure, and the step that it follows from."""
    planned = PlannedStep(run.config, run.train, CUDA, run.mesh)
    step = simulated_step(planned, run.device)
    tokens = run.train.tokens_per_step / step.seconds / run.mesh.processes
    if run.figure == "tokens/s":
        return tokens, step
    forward = forward_flops(run.config.build(device="meta"), run.train.seq_len)
    once = sum(forward.values())
    if run.figure == "TFLOP/s":
        return tokens * (4 * once - forward["head"]) / 1e12, step
    return 100 * tokens * 3 * once / run.device.peak(torch.bfloat16), step


PLANNED = [  # preset, tokens of a text, rows, tokens of all, mesh, rows at once, checkpointing
    ("llama-2-7b", 4096, 1024, 2e12, {"shard": 8}, 2, False),
    ("llama-2-7b", 4096, 1024, 2e12, {"data": 8, "shard": 8}, 2, False),
    ("llama-2-7b", 4096, 1024, 2e12, {"data": 64, "shard": 8}, 2, False),
    ("llama-2-7b", 4096, 4096, 2e12, {"data": 512, "shard": 8}, 1, False),
    ("llama-2-70b", 4096, 1024, 2e12, {"shard": 64}, 2, True),
    ("llama-2-70b", 4096, 1024, 2e12, {"shard": 512}, 2, True),
    ("llama-2-70b", 4096, 4096, 2e12, {"data": 8, "shard": 512}, 1, True),
    ("llama-3.1-405b", 8192, 2048, 15.6e12, {"shard": 8, "tensor": 8, "pipeline": 8}, 1, True),
    (
        *("llama-3.1-405b", 8192, 2048, 15.6e12),
        *({"data": 4, "shard": 8, "tensor": 8, "pipeline": 16}, 1, True),
    ),
]


def main() -> None:
    """Both tables, in Markdown."""
    print("| run | parameters | mesh | published | simulated | difference | where the time goes |")
    print("|---|---|---|---|---|---|---|")
    for run in published():
        figure, step = simulated(run)
        difference = "from this run" if run.calibrates else f"{figure / run.published - 1:+.0%}"
        print(
            f"| {run.name}, {run.source}, {run.train.seq_len:,} tokens "
            f"| {parameters(run.config)} | {named(run.mesh)} "
            f"| {run.published:,g} {run.figure} | {figure:,.4g} | {difference} | {parts(step)} |"
        )
    h100 = find_device("h100")
    print(
        "\n| model | devices | mesh | rows at once | memory | MFU | tokens/s of each | days "
        "| failures | goodput |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, seq_len, rows, tokens, ways, at_once, again in PLANNED:
        config = find_preset(name).config.replace(max_seq_len=seq_len)
        mesh = ParallelismConfig.from_dict(ways)
        steps = round(tokens / (rows * seq_len))
        train = training(
            rows, seq_len, micro_batch_size=at_once, activation_checkpointing=again
        ).replace(steps=steps, checkpoint_every=100)
        planned = PlannedStep(config, train, CUDA, mesh)
        held = device_memory(planned).total
        step = simulated_step(planned, h100)
        seconds = steps * step.seconds
        lost = failures(train, seconds, mesh.processes)
        speed = rows * seq_len / step.seconds / mesh.processes
        once = sum(forward_flops(config.build(device="meta"), seq_len).values())
        mfu = speed * 3 * once / h100.peak(torch.bfloat16)
        days = seconds / DAY / lost["goodput"]
        print(
            f"| {name} | {mesh.processes:,} | {named(mesh)} | {at_once}{', checkpointed' * again} "
            f"| {held / 1e9:.0f} GB | {mfu:.0%} | {speed:,.0f} | {rounded(days)} "
            f"| {rounded(lost['expected'])} | {lost['goodput']:.1%} |"
        )


def rounded(number: float) -> str:
    """To whole ones where there are ten or more."""
    return f"{number:,.0f}" if number >= TEN else f"{number:.2g}"


def parameters(config: DecoderConfig) -> str:
    """How many, in words."""
    weights = sum(one.numel() for one in config.build(device="meta").parameters())
    return f"{weights / 1e9:.1f} · 10⁹"


def named(mesh: ParallelismConfig) -> str:
    """A mesh in words."""
    return " × ".join(f"{name} {ways}" for name, ways in mesh.ways.items() if ways > 1)


def parts(step: StepTime) -> str:
    """Where the time of a step goes."""
    shares = {name: seconds / step.seconds for name, seconds in vars(step).items()}
    shown = {name.replace("_", " "): share for name, share in shares.items() if share > SHOWN}
    return ", ".join(f"{name} {share:.0%}" for name, share in shown.items())


if __name__ == "__main__":
    main()
