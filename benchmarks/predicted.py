"""Training by two processes of one thread each, compared with the simulation of `plan`.

    python -m benchmarks.predicted [--dtypes float32 bfloat16] [--rounds 3]

One process is measured, and also the link between two. From these figures the simulation predicts
every kind of parallelism, which is then measured. The batch stays the same.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.contestants import several
from benchmarks.contestants.ours import gpt
from benchmarks.harness.command import at_least_one
from benchmarks.harness.machine import describe
from benchmarks.harness.shapes import DTYPES, TRAINING
from workhorse.memory.device_memory import device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.parallel.config import ParallelismConfig
from workhorse.plan.devices import Cluster, Link
from workhorse.plan.step_time import step_time
from workhorse.train.recipe.training import TrainConfig

SHAPE = "baby"
CPU = torch.device("cpu")
WAYS = ("data", "shard", "context", "tensor", "pipeline")
LARGE, SMALL, REPEATS = 2**24, 2**4, 20
"""Number of elements that are gathered to measure a link, and of repetitions."""
UNLIMITED = 1e18
"""Memory bandwidth: memory traffic is already part of the rate that one process reaches."""


def in_process(work: Callable[[], float]) -> float:
    """The result of a function in a separate process, which may start other processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work).result()


def tokens_per_second(dtype: str, ways: dict[str, int], rounds: int) -> float:
    """Tokens per second, the median of some rounds."""
    processes = 2 if ways else 1
    take = several.train(
        shape=SHAPE,
        dtype=dtype,
        rows=TRAINING[SHAPE].batch,
        processes=processes,
        how="workhorse",
        parallel=ways,
        threads=1,
    )
    return statistics.median(take()["tokens"] for _ in range(rounds))


def gather_seconds(numbers: int) -> float:
    """Seconds of an all-gather of float32 elements between two processes, with gloo."""
    place = f"file://{tempfile.mkdtemp()}/meeting"
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=_gather, args=(1, place, numbers), daemon=True)
    other.start()
    return _gather(0, place, numbers)


def _gather(rank: int, place: str, numbers: int) -> float:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    own = torch.ones(numbers)
    both = [torch.empty(numbers) for _ in range(2)]
    dist.all_gather(both, own)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_gather(both, own)
    seconds = (time.perf_counter() - begin) / REPEATS
    dist.destroy_process_group()
    return seconds


def main() -> None:
    """Measure, predict, and print both."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument("--rounds", type=at_least_one, default=3)
    given = options.parse_args()
    sizes = TRAINING[SHAPE]
    config = gpt(sizes)
    latency = in_process(partial(gather_seconds, SMALL))
    bandwidth = LARGE * 4 / (in_process(partial(gather_seconds, LARGE)) - latency)
    print(", ".join(describe(1, "cpu").values()))
    print(f"{bandwidth / 1e9:.2f} GB/s and {1e6 * latency:.0f} µs between two processes\n")
    print("| | measured, tokens/s | predicted | difference |\n|---|---|---|---|")
    for dtype in given.dtypes:
        train = TrainConfig.from_dict(
            {"steps": 1, "batch_size": sizes.batch, "seq_len": sizes.context, "dtype": dtype}
        )
        tokens = train.tokens_per_step
        alone = in_process(partial(tokens_per_second, dtype, {}, given.rounds))
        print(f"| {dtype}, one process | {alone:,.0f} | | |", flush=True)

        def predicted(flops: float, ways: dict[str, int], train: TrainConfig = train) -> float:
            link = Link(bandwidth, latency)
            cluster = Cluster(flops, UNLIMITED, link, link, node=2, sends_aside=False)
            parallel = ParallelismConfig.from_dict(ways)
            step = PlannedStep(config, train, CPU, parallel)
            whole = PlannedStep(config, train, CPU, parallel.replace(pipeline=1))
            return step_time(step, cluster, device_memory(whole, updates=False)).seconds

        flops = predicted(1.0, {}) * alone / tokens  # all time is attributed to arithmetic
        for way in WAYS:
            measured = in_process(partial(tokens_per_second, dtype, {way: 2}, given.rounds))
            simulated = tokens / predicted(flops, {way: 2})
            figures = f"{measured:,.0f} | {simulated:,.0f} | {simulated / measured - 1:+.0%}"
            print(f"| {dtype}, {way} 2 | {figures} |", flush=True)


if __name__ == "__main__":
    main()
