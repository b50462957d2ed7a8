"""Multi-GPU features as far as one GPU can test them: each kind of parallelism, and checkpoints.

With one rank, parallelism changes no result. The checks show that its code runs on the device and
that the backend accepts the messages. FSDP sends nothing to itself, so its exact sums are skipped.
Checks with two processes store the output of the command line.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contestants.ours import gpt
from benchmarks.gpu.block import Check, Figures, Setting, seconds_of
from benchmarks.harness.shapes import DECODING, TRAINING, Shape
from workhorse.checkpoints import MODEL, OPTIMIZER, CheckpointStore
from workhorse.data import Batch
from workhorse.models.families.llama import llama
from workhorse.native.allocator import keep_freed_memory
from workhorse.nn import Decoder, DecoderConfig
from workhorse.parallel.config import MicroBatches, ParallelismConfig
from workhorse.parallel.division.layers import TensorParallelGroup, divide_layers
from workhorse.parallel.division.sequences import ContextParallelGroup
from workhorse.parallel.division.sharding import shard
from workhorse.parallel.division.stages import Pipeline, divide_stages, keep_stage
from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.world import ALONE
from workhorse.parallel.shards import local
from workhorse.train import TrainConfig
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.objectives.objective import Divided, Objective
from workhorse.train.saver import Saver
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

RELATIVE = 1e-5
"""Largest difference of a gradient in float32, relative to its largest element."""
COST = 0.02
"""Goal for the slowdown of a step while a checkpoint is written."""
PATIENCE = 100.0
"""Time limit in seconds for a run of two processes."""
MOST_STEPS = 400
"""Maximum number of steps while one checkpoint is written."""

Divide = Callable[[Decoder, torch.device], Objective]


def checks(setting: Setting) -> Iterator[Check]:
    """Parallelism with one rank, runs of two processes, then a checkpoint."""
    yield Check("backend", partial(_backend, setting.device))
    divisions: dict[str, Divide] = {
        "shard": _sharded,
        "tensor": _in_layers,
        "pipeline": _in_stages,
        "context": _in_sequences,
    }
    for name, divide in divisions.items():
        yield Check(f"{name}: 1", partial(_beside_whole, divide, setting))
    for name in ("shard",) if setting.tiny else ("data", "shard", "tensor", "pipeline"):
        yield Check(f"{name}: 2", partial(_two_processes, name, setting))
    yield Check("checkpoint meanwhile", partial(_checkpoint, setting))


@contextmanager
def _together(device: torch.device) -> Iterator[Group]:
    """A process group of only this process, which sends to itself with the device's backend."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        try:
            yield Group(0, 1)
        finally:
            dist.destroy_process_group()


def _backend(device: torch.device) -> Figures:
    """Run each collective operation once."""
    x = torch.arange(8.0, device=device)
    with _together(device) as group:
        gathered = torch.empty(1, 8, device=device)
        dist.all_gather(list(gathered), x)
        added, largest = x.clone(), x.clone()
        dist.all_reduce(added)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        found = {
            "all_gather": gathered[0],
            "all_to_all": group.exchange(x),
            "all_to_all_uneven": group.exchange(x, [8], [8]),
            "all_reduce": added,
            "all_reduce_max": largest,
            "broadcast": group.broadcast_last_(x.clone()),
        }
        name = dist.get_backend()
    wrong = [operation for operation, y in found.items() if not torch.equal(x, y)]
    return {"backend": name, "value": wrong, "goal": [], "reached": not wrong}


def _sharded(decoder: Decoder, device: torch.device) -> Objective:
    objective = NextToken(decoder)
    once = MicroBatches(rows=1, size=1, parts=1)
    shard(objective, decoder.layers, ParallelismConfig(), device, micro_batches=once)
    return objective


def _in_layers(decoder: Decoder, device: torch.device) -> Objective:
    del device
    objective = NextToken(decoder)
    team = TensorParallelGroup(Group(0, 1), decoder.config.vocab_size)
    divide_layers(objective, decoder.config, team)
    return objective


def _in_stages(decoder: Decoder, device: torch.device) -> Objective:
    del device
    objective, pipeline = NextToken(decoder), Pipeline(Group(0, 1))
    keep_stage(decoder, pipeline)
    divide_stages(objective, pipeline, torch.float32)
    return objective


def _in_sequences(decoder: Decoder, device: torch.device) -> Objective:
    del device
    team = ContextParallelGroup(Group(0, 1))
    return Divided(NextToken(decoder, team=team), team)


def _beside_whole(divide: Divide, setting: Setting) -> Figures:
    """Loss, gradients and time of a pass in float32, compared with the undivided decoder."""
    device, shape = setting.device, TRAINING["tiny" if setting.tiny else "gpt2"]
    torch.manual_seed(0)
    whole = gpt(shape).build().to(device)
    decoder = deepcopy(whole)
    batch = _batch(shape.vocab_size, 2, shape.context).to(device)
    alone = partial(_pass, whole, NextToken(whole), batch)
    with _together(device):
        divided = partial(_pass, decoder, divide(decoder, device), batch)
        expected, found = alone(), divided()
        assert expected.keys() == found.keys()
        differences = {name: _difference(found[name], expected[name]) for name in expected}
        seconds = [seconds_of(work, device, 1 if setting.tiny else 10) for work in (alone, divided)]
    above = {name: apart for name, apart in differences.items() if not apart <= RELATIVE}
    return {
        "shape": shape.name,
        "tensors": len(differences),
        "value": max(differences.values()),
        "goal": RELATIVE,
        "reached": not above,
        "above": above,
        "seconds_whole": seconds[0],
        "seconds_divided": seconds[1],
    }


def _pass(decoder: Decoder, objective: Objective, batch: Batch) -> dict[str, Tensor]:
    """The mean loss, and the gradient of every weight by name."""
    decoder.zero_grad()
    loss = objective(batch).loss / batch.targets.numel()
    loss.backward()
    gradients = {
        name: local(weight.grad)
        for name, weight in decoder.named_parameters()
        if weight.grad is not None
    }
    return {"loss": loss.detach(), **gradients}


def _difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


def _batch(vocabulary: int, rows: int, context: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(vocabulary, (rows, context + 1), generator=generator)
    tokens, targets = texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
    return Batch(tokens, targets, None, torch.zeros(rows, dtype=torch.int64))


def _two_processes(division: str, setting: Setting) -> Figures:
    """Output of `workhorse train --workers 2`; on a machine with one GPU, both use it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, recipe = folder / "text.txt", folder / "recipe.json"
        text.write_text("".join(f"{number} and {number * 7}; " for number in range(4000)))
        fields = {
            "name": "two",
            "model": gpt(TRAINING["tiny"]).replace(vocab_size=512).to_dict(),
            "tokenizer": {"kind": "bytes"},
            "data": {"corpus": {"kind": "text", "path": str(text)}},
            "train": {
                **{"steps": 4, "batch_size": 4, "seq_len": 64, "log_every": 1},
                "device": str(setting.device),
            },
            "parallel": {division: 2},
        }
        recipe.write_text(json.dumps(fields))
        command = [sys.executable, "-m", "workhorse", "train", str(recipe), "--workers", "2"]
        command += ["--out", str(folder / "run"), "--json"]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=PATIENCE
        )
    loss = json.loads(done.stdout)["loss"] if done.returncode == 0 else None
    return {"code": done.returncode, "loss": loss, "says": done.stderr[-1500:]}


def _checkpoint(setting: Setting) -> Figures:
    """Steps of a large model while its checkpoint is written, compared with earlier steps."""
    device = setting.device
    decoder, batch = _large(setting)
    config = TrainConfig.from_dict(
        {
            **{"steps": 1_000_000, "batch_size": len(batch), "seq_len": batch.tokens.shape[1]},
            **{"optimizer": {"kind": "adamw"}, "dtype": "auto"},
        }
    )
    with tempfile.TemporaryDirectory() as folder, keep_freed_memory(device):
        step = build_step(decoder, config, device)
        take = partial(_timed_step, step, batch)
        for _ in range(3):
            take()
        alone = [take() for _ in range(5 if setting.tiny else 20)]
        paths: list[Path] = []
        saver = Saver(CheckpointStore(Path(folder)), lambda _, path: paths.append(path), ALONE)
        weights = partial(step.optimizer.masters.weights, decoder)
        begun = time.perf_counter()
        saver.save(1, {MODEL: weights, OPTIMIZER: step.optimizer.tensors}, {})
        held_up = time.perf_counter() - begun
        meanwhile: list[float] = []
        while not paths and len(meanwhile) < MOST_STEPS:
            meanwhile.append(take())
            saver.look()
        saver.wait()
        written = time.perf_counter() - begun
        size = sum(file.stat().st_size for file in paths[0].iterdir())
    before = statistics.median(alone)
    cost = statistics.median(meanwhile) / before - 1 if meanwhile else None
    return {
        "parameters": sum(weight.numel() for weight in decoder.parameters()),
        "bytes": size,
        "seconds_alone": before,
        "seconds_meanwhile": statistics.median(meanwhile) if meanwhile else None,
        "slowest_meanwhile": max(meanwhile, default=None),
        "steps_meanwhile": len(meanwhile),
        "seconds_held_up": held_up,
        "seconds_until_written": written,
        "value": cost,
        "goal": COST,
        "reached": cost is not None and cost <= COST,
    }


def _large(setting: Setting) -> tuple[Decoder, Batch]:
    """A decoder, and a batch for it."""
    if setting.tiny:
        shape, rows = TRAINING["tiny"], 4
        config = gpt(shape)
    else:
        shape, rows = DECODING["1b"], 4
        config = _llama(shape)
    decoder = config.build(device=setting.device)
    return decoder, _batch(shape.vocab_size, rows, shape.context)


def _llama(shape: Shape) -> DecoderConfig:
    return llama(
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        d_ff=shape.d_ff,
        vocab_size=shape.vocab_size,
        max_seq_len=shape.context,
    )


def _timed_step(step: TrainingStep, batch: Batch) -> float:
    """Seconds of a step; it ends when its loss is known and its update is done."""
    started = time.perf_counter()
    step.update(*step.backward(batch), schedule=1.0)
    if step.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
