"""`plan`: estimate memory, FLOPs, time and cost of a model and its training, without running it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from workhorse.devices.memory import GIB, available
from workhorse.devices.names import resolve_device, training_dtype
from workhorse.errors import WorkhorseError
from workhorse.memory.account import account
from workhorse.memory.capacity import largest_share, usable
from workhorse.memory.device_memory import DeviceMemory, device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.describe import (
    active_parameters,
    count_parameters,
    flops_per_token,
    forward_flops,
    recomputed_flops,
)
from workhorse.parallel.config import ParallelismConfig
from workhorse.plan.collectives import collectives
from workhorse.plan.devices import GIGA, DeviceConfig, find_device
from workhorse.plan.limits import limits, remedies, serving
from workhorse.plan.step_time import simulated_step
from workhorse.plan.subject import find_subject, has_end, optima
from workhorse.run.minutes import remark, steps_within, with_steps
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import measured_peak
from workhorse.transforms.adapters import trained_parameters

HERE = "this machine"
"""Name of the device if none is given."""
UTILIZATION = 0.4
"""Default for the fraction of a device's peak that training reaches."""
HOUR = 3600
HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Mean hours between failures of one device, from 419 unexpected interruptions of 16,384 devices in
54 days (2407.21783 §3.3.4)."""
RESTART = 600
"""Seconds from a device failure until training runs again."""
MILLION = 10**6
"""Number of tokens that time and cost are for if nothing determines the number of steps."""
MOST = 1e100
"""Largest allowed value of a numeric option, so that all results are finite."""


def plan(
    source: str | Path,
    settings: Iterable[str] = (),
    *,
    device: str | None = None,
    devices: int | None = None,
    memory: float | None = None,
    utilization: float | None = None,
    price: float | None = None,
    budget: float | None = None,
    context: int | None = None,
    measure: bool = False,
    notify: Callable[[str], object] = lambda line: None,
    show: Callable[[str], object] = lambda doing: None,
) -> dict[str, Any]:
    """Estimate parameters, arithmetic, memory, time and cost of a training, as plain data.

    Args:
        source: a recipe's file, `depth-N` for a built-in recipe, a run directory, a preset's name,
            or a stored model.
        settings: overrides as `section.key=value`, including `parallel.key=value`.
        device: a name in `known_devices`; None: this machine.
        devices: total number of devices; None: the product of the `parallel` settings. If these
            describe a single device, `parallel.shard` becomes `devices`; otherwise `parallel.data`
            is changed to match.
        memory: memory per device in GiB; None: from the device's data sheet, or the free memory of
            this machine.
        utilization: fraction of the peak FLOP/s that training reaches; None: simulated for one
            device with a known `reached`, `UTILIZATION` for others. Without it, the time of several
            devices is not estimated.
        price: price of a device per hour, in any currency. Like `utilization`, it needs a known
            device or `measure`; with several devices also `utilization`.
        budget: floating-point operations for the compute-optimal sizes; None: those of the planned
            training.
        context: number of tokens per sequence in serving; None: the model's maximum.
        measure: True to measure this machine's peak FLOP/s.
        notify: callback for each warning about the settings.
        show: callback for progress messages.

    Returns:
        The same data as `--json`: `source`, `kind`, `assumed`, `config`, `train`, `parameters`,
        `flops`, `device`, `parallel`, `memory` and `moments` (bytes), `collectives` (each as in
        `Collective`), `remedies`, `limits` (None if the memory is unknown), `time` (seconds; None
        if the peak FLOP/s are unknown, and with several devices without `utilization`),
        `compute_optimal` (None with an adapter, or without steps and `budget`) and `serving`. For
        fine-tuning without a number of steps, `train.steps` is None, and `flops` and `time` are for
        `MILLION` tokens.

    Raises:
        WorkhorseError: the source or device does not exist, the mesh does not divide the model or
            its batches evenly, or an option would have no effect.
    """
    _check_finite(memory=memory, utilization=utilization, price=price, budget=budget)
    if device is not None and measure:
        raise WorkhorseError(
            "--measure measures this machine and cannot be combined with --device; remove one"
        )
    subject = find_subject(source, list(settings), notify, devices=devices)
    if budget is not None and subject.adapter is not None:
        raise WorkhorseError(f"--budget {budget:g} has no effect on an adapter; remove it")
    spec = None if device is None else find_device(device)
    target = torch.device("cuda") if spec else resolve_device(subject.train.device)
    step = subject.step(_for_device(subject.train, target, spec), target)
    room = _room(memory, target, spec)
    config, mesh, adapter = step.config, step.parallel, step.adapter
    if context is not None and context > config.max_seq_len:
        raise WorkhorseError(
            f"--context {context} is more than the model's max_seq_len={config.max_seq_len}; "
            f"set model.max_seq_len={context}, or choose at most {config.max_seq_len}"
        )
    given = {"price": price, "minutes": step.train.minutes}
    timed = utilization is not None or mesh.processes == 1
    if not timed:
        _check_time(f"{mesh.processes:,} devices", "--utilization", **given)
    elif spec is None and not measure:
        given["utilization"] = utilization
        _check_time("this machine", "--measure or --device NAME", **given)
    peak = _peak(step, spec, measure) if timed else None
    show("recording a training step")
    step = _with_micro_batch(step, room)
    reach = partial(_time, peak=peak, spec=spec, utilization=utilization)
    step = _with_steps(step, reach, notify=notify)
    train, ends = step.train, has_end(step.train)
    fullest = device_memory(step)
    show("counting collectives")
    sent = collectives(step, fullest.stage)
    show("searching for the largest step that fits")
    most = None if room is None else limits(step, room)
    show("comparing remedies")
    found = remedies(step, room) if room is not None and fullest.total > room else []
    show("computing the memory of serving")
    flops = _flops(step)
    work = budget or flops["training"]
    optimal = {"flops": work, "laws": [law._asdict() for law in optima(work)]}
    trained = {}
    if adapter is not None:
        decoder = adapter.adapt(config.build(device="meta"), seed=0)
        trained["trained"] = trained_parameters(decoder)
    return {
        "source": subject.name,
        "kind": subject.kind,
        "assumed": list(subject.assumed),
        "config": config.to_dict(),
        "train": {**train.to_dict(), "steps": train.steps if ends else None},
        "parameters": {**count_parameters(config), "active": active_parameters(config), **trained},
        "flops": flops,
        "device": {"name": f"{HERE} ({target})"} if spec is None else spec.to_dict(),
        "parallel": _ways(mesh),
        "memory": {
            "stage": fullest.stage,
            "in_flight": fullest.in_flight,
            "gathered": fullest.gathered,
            **account(fullest.held, fullest.activations, fullest.peak, room),
        },
        "moments": _moments(fullest),
        "collectives": [one._asdict() for one in sent],
        "remedies": [remedy._asdict() for remedy in found],
        "limits": most and most._asdict(),
        "time": reach(step, flops, price=price),
        "compute_optimal": optimal if budget or (adapter is None and ends) else None,
        "serving": serving(
            config,
            target,
            context=context or config.max_seq_len,
            room=room,
            bandwidth=spec.bandwidth if spec else None,
        ),
    }


def plan_devices(
    source: str | Path,
    settings: Sequence[str],
    names: Sequence[str | None],
    prices: Sequence[float] = (),
    *,
    notify: Callable[[str], object] = lambda line: None,
    **options: Any,
) -> dict[str | None, dict[str, Any]]:
    """Return the result of `plan` for each of several devices, by name.

    `prices` has a price for each device, or is empty. `plan` describes the other arguments.

    Raises:
        WorkhorseError: see `plan`; or a device is given twice, or the number of prices is wrong.
    """
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise WorkhorseError(f"--device {twice} is given {names.count(twice)} times; keep one")
    if prices and len(prices) != len(names):
        raise WorkhorseError(
            f"--price is given {len(prices)} times for {len(names)} devices; give it once for each"
        )
    for name in names:  # before the first plan, which takes seconds
        if name is not None:
            find_device(name)
    notify = cache(notify)  # calls it once with each line
    return {
        name: plan(source, settings, device=name, price=price, notify=notify, **options)
        for name, price in zip(names, prices or [None] * len(names), strict=True)
    }


def _check_finite(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and math.isnan(value):
            raise WorkhorseError(f"--{name} {value} is not a number; give one, or remove it")
        if value and not 1 / MOST <= value <= MOST:
            raise WorkhorseError(
                f"--{name} {value:g} is out of range; give a number from {1 / MOST:g} to {MOST:g}"
            )


def _check_time(missing: str, remedy: str, **given: float | None) -> None:
    """Raise an error if an option needs a time estimate, which `missing` does not have."""
    for name, value in given.items():
        if value:
            option = f"train.{name}=" if name == "minutes" else f"--{name} "
            raise WorkhorseError(
                f"{option}{value:g} needs a time estimate, which is not available for {missing}; "
                f"add {remedy}"
            )


def _for_device(train: TrainConfig, device: torch.device, spec: DeviceConfig | None) -> TrainConfig:
    """The training settings for a device: `auto` is replaced by the actual dtype and device."""
    if spec is None:
        name = str(training_dtype(train.dtype, device)).removeprefix("torch.")
        return train.replace(dtype=name, device=str(device))
    if train.dtype == "float16":
        raise WorkhorseError(
            "train.dtype=float16 cannot be planned: the memory of autocast's copies is unknown; "
            "use bfloat16 or float32"
        )
    known = [name for name in ("bfloat16", "float32") if getattr(spec, name)]
    return train.replace(dtype=known[0] if train.dtype == "auto" else train.dtype, device="cuda")


def _room(memory: float | None, device: torch.device, spec: DeviceConfig | None) -> int | None:
    if memory is not None:
        return int(memory * GIB)
    return available(device) if spec is None else int(spec.memory * GIGA)


def _with_micro_batch(step: PlannedStep, room: int | None) -> PlannedStep:
    """Replace `micro_batch_size: auto` by the size that training would choose, at least 1."""
    if step.train.micro_batch_size != "auto":
        return step
    if room is None:
        raise WorkhorseError(
            "micro_batch_size=auto needs the memory of the device, which is unknown; give a number "
            "or --memory"
        )

    def needed(rows: int) -> int:
        return device_memory(step.with_train(micro_batch_size=rows)).total

    most = step.parallel.micro_batches(step.train.batch_size).size
    together = step.train.objective.rows_together
    rows = largest_share(needed, usable(room, step.device), most, together)
    return step.with_train(micro_batch_size=max(1, rows))


def _with_steps(
    step: PlannedStep,
    reach: Callable[..., dict[str, Any] | None],
    *,
    notify: Callable[[str], object],
) -> PlannedStep:
    """Replace `train.minutes` by the estimated number of steps that fit into this time."""
    train = step.train
    if train.minutes is None:
        return step
    one = replace(step, train=with_steps(train, 1))
    time = reach(one, _flops(one))
    assert time is not None, "the peak is known"
    seconds = time["seconds"]
    found = with_steps(train, steps_within(train, 60 * train.minutes, seconds))
    notify(remark(train, found, seconds))
    return replace(step, train=found)


def _flops(step: PlannedStep) -> dict[str, Any]:
    """FLOPs per token, by component and in total, and FLOPs of the whole training.

    FLOPs repeated by activation checkpointing are only in `repeated_per_token`.
    """
    train, decoder = step.train, step.config.build(device="meta")
    forward = forward_flops(decoder, train.seq_len)
    each = flops_per_token(decoder, train.seq_len, frozen=step.adapter is not None)
    once = sum(forward.values())
    repeats = train.activation_checkpointing
    repeated = recomputed_flops(decoder, train.seq_len) if repeats else 0
    tokens = train.length * train.tokens_per_step if has_end(train) else MILLION
    return {
        "forward": forward,
        "forward_per_token": once,
        "backward_per_token": each - once,
        "repeated_per_token": repeated,
        "per_token": each,
        "training": each * tokens,
        "tokens": tokens,
    }


def _peak(step: PlannedStep, spec: DeviceConfig | None, measure: bool) -> tuple[float, str] | None:
    """The device's peak FLOP/s and a description of that figure; None if it is unknown."""
    train = step.train
    dtype = getattr(torch, train.dtype)
    if spec is not None:
        tf32 = train.matmul_precision == "high"
        return spec.peak(dtype, tf32=tf32), f"{spec.name}, {train.dtype}, {spec.source}"
    if not measure:
        return None
    return measured_peak(train, step.device), f"fastest matmul in {train.dtype}, measured here"


def _ways(mesh: ParallelismConfig) -> dict[str, int]:
    return {**mesh.ways, "devices": mesh.processes}


def _moments(memory: DeviceMemory) -> list[dict[str, Any]]:
    """For each part of the model in each phase of the step, the moment that needs the most memory.

    The moments are in the order of the step.
    """
    fullest: list[Any] = []
    for moment in memory.moments:
        if not fullest or (moment.phase, moment.part) != (fullest[-1].phase, fullest[-1].part):
            fullest.append(moment)
        elif sum(moment.kinds.values()) > sum(fullest[-1].kinds.values()):
            fullest[-1] = moment
    return [{"phase": one.phase, "part": one.part, **one.kinds} for one in fullest]


def _time(
    step: PlannedStep,
    flops: dict[str, Any],
    *,
    peak: tuple[float, str] | None,
    spec: DeviceConfig | None,
    utilization: float | None,
    price: float | None = None,
) -> dict[str, Any] | None:
    """Time and cost of `flops["tokens"]`; the utilization counts recomputed operations too."""
    if peak is None:
        return None
    (rate, of), devices, train = peak, step.parallel.processes, step.train
    simulated, each = None, flops["per_token"] + flops["repeated_per_token"]
    if utilization is None and spec is not None and spec.reached is not None:
        simulated = simulated_step(step, spec)
        utilization = each * train.tokens_per_step / (simulated.seconds * rate)
    utilization = utilization or UTILIZATION
    seconds = each * flops["tokens"] / (rate * utilization * devices)
    hours = seconds * devices / HOUR
    return {
        "seconds": seconds,
        "device_hours": hours,
        "cost": None if price is None else hours * price,
        "peak_flops": rate,
        "peak_of": of,
        "utilization": utilization,
        "steps": train.steps if has_end(train) else None,
        "step": simulated and asdict(simulated),
        "failures": failures(train, seconds, devices),
    }


def failures(train: TrainConfig, seconds: float, devices: int) -> dict[str, float]:
    """Expected number of device failures in a training of `seconds`.

    `goodput` is the fraction of the time that is not lost to failures.
    """
    between = HOURS_BETWEEN_FAILURES * HOUR / devices
    since_checkpoint = min(seconds, train.checkpoint_every * seconds / train.length)
    return {
        "expected": seconds / between,
        "goodput": 1 / (1 + (since_checkpoint / 2 + RESTART) / between),
    }
