"""Estimates of the memory and time that a recipe needs, and a dry run of training it."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from workhorse.checkpoints import RunDirectory
from workhorse.data import iterate_documents
from workhorse.devices.memory import available
from workhorse.devices.names import training_dtype, use_threads
from workhorse.memory.account import account
from workhorse.memory.capacity import fit_micro_batch, recordable
from workhorse.memory.device_memory import device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.describe import (
    active_parameters,
    exports_as,
    flops_per_token,
    recomputed_flops,
)
from workhorse.optim.groups import parameters_by_role
from workhorse.parallel.processes import environment
from workhorse.run.check import check_length, check_recipe, recipe_warnings
from workhorse.run.minutes import as_begun, steps_within, timed, with_steps
from workhorse.run.run import check_run, reason_not_free
from workhorse.tokenizers import train_tokenizer
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.step.build import build_step, measured_peak
from workhorse.transforms.adapters import trained_parameters

TIMED_BYTES = 2**30
TIMED_SECONDS = 1.0
"""Limits for timing real steps: memory of a step in bytes, and its time in seconds, estimated from
the rate of a large GEMM. Above either limit no step is run, and the estimate is used."""
TIMED_STEPS = 3
MATRIX_PRODUCT = "matrix product"


def estimate(recipe: Recipe) -> dict[str, Any]:
    """Estimate parameters, memory and time of a recipe. Writes nothing.

    Returns:
        A dictionary with these keys:

        - `recipe`: the recipe with all defaults and the full model
        - `device`, `processes`
        - `config`: the full config of the decoder
        - `exports_as`: the transformers class that the model can be exported to, or the differences
          from the nearest one
        - `parameters`: without an adapter `total`, `active` per token and one count per role;
          `trained` if there is an adapter
        - `memory`: bytes of a step in the process that needs the most memory, see `account`. For
          float16 these are the bytes of float32, see `recordable`. On a CPU all processes are
          assumed to share this machine.
        - `micro_batch_size`: the size in use; `auto` is resolved
        - `steps`: the number of steps, computed from `train.minutes` if that is set
        - `tokens`: tokens of the whole run
        - `flops_per_token`
        - `seconds`: time of the whole run, without generation and validation
        - `seconds_from`: `"steps"` if steps on random tokens were timed. For a large model it is
          `"matrix product"`: a lower bound, the time of the arithmetic at the rate of the fastest
          GEMM.

    Raises:
        WorkhorseError: `train` would raise this error before its first step.
    """
    device = check_recipe(recipe)
    config = recipe.train
    check_length(recipe)
    if config.threads:
        use_threads(config.threads)
    decoder_config = recipe.decoder_config(vocab_size_of(recipe))
    adapter = recipe.adapter
    decoder = decoder_config.build(config.kernel, device="meta")
    active = active_parameters(decoder_config)
    flops = flops_per_token(decoder, config.seq_len, frozen=adapter is not None)
    repeated = recomputed_flops(decoder, config.seq_len) if config.activation_checkpointing else 0
    roles = {
        role: sum(parameter.numel() for parameter in parameters.values())
        for role, parameters in parameters_by_role(decoder).items()
    }
    trained = {}
    if adapter is not None:
        trained["trained"] = trained_parameters(adapter.adapt(decoder, seed=0))
    parallel = recipe.parallel
    step = PlannedStep.of_recipe(recipe, decoder_config, device)
    step = fit_micro_batch(replace(step, train=config))
    config, own = step.train, device_memory(recordable(step))
    free = available(device)
    if free is not None and device.type == "cpu":
        free //= environment.count_here(parallel.processes)
    memory = account(own.held, own.activations, own.peak, free)
    work = (flops + repeated) * config.tokens_per_step
    seconds, source = work / measured_peak(config, device), MATRIX_PRODUCT
    if own.total <= TIMED_BYTES and memory["fits"] is not False and seconds <= TIMED_SECONDS:
        seconds = time_steps(step)
        source = "steps"
    if config.minutes is not None:
        left = 60 * config.minutes - timed(config)
        config = with_steps(config, steps_within(config, left, seconds))
    steps = config.length
    return {
        "recipe": recipe.expanded().to_dict(),
        "config": decoder_config.to_dict(),
        "exports_as": exports_as(decoder_config),
        "parameters": {"total": sum(roles.values()), "active": active, **trained, **roles},
        "memory": memory,
        "micro_batch_size": config.micro_batches(parallel).size,
        "steps": steps,
        "tokens": steps * config.tokens_per_step,
        "flops_per_token": flops,
        "seconds": steps * seconds,
        "seconds_from": source,
        "device": str(device),
        "processes": parallel.processes,
    }


def vocab_size_of(recipe: Recipe) -> int:
    """Return the largest vocabulary size that the recipe's tokenizer can have.

    If the tokenizer's config does not set it, the tokenizer is loaded, or trained in memory.
    """
    size = getattr(recipe.tokenizer, "vocab_size", None)
    if size is not None:
        return size
    return train_tokenizer(recipe.tokenizer, iterate_documents(recipe.data)).vocab_size


def time_steps(planned: PlannedStep) -> float:
    """Time a few training steps on random tokens and return the seconds of the fastest.

    The first step does not count. This process computes whole steps, even if `parallel` asks for
    several processes.
    """
    planned = fit_micro_batch(planned)
    config, train, device = planned.config, planned.train, planned.device
    tokens = torch.randint(config.vocab_size, (train.batch_size, train.seq_len))
    batch = train.objective.synthetic(tokens)
    times = []
    if planned.adapter is None:
        decoder = config.build(train.kernel, device=device)
    else:
        dtype = training_dtype(train.dtype, device)
        draw = config.draw(device)
        decoder = planned.adapter.trainable(config, train.kernel, device, dtype, draw)
    step = build_step(decoder, train, device, parallel=planned.parallel)
    for _ in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        step.update(*step.backward(batch), schedule=1.0)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def dry_run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    notify: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Report what `train` would do with a recipe and the resources it needs. Writes nothing.

    Args:
        recipe: the recipe to train.
        out: the run directory; None for `runs/NAME`. If `runs/NAME` is in use by another run, this
            is not an error; it is reported to `notify`.
        resume: True to continue the run in `out`.
        notify: called with each line that `train` would report, before steps are timed.

    Returns:
        The result of `estimate`. Unless `runs/NAME` is in use, it has three more keys, and
        `seconds` counts only the remaining steps:

        - `run_directory`
        - `step`: the number of steps done; 0 for a new run
        - `changes`: the changes of the recipe since the last checkpoint

    Raises:
        WorkhorseError: `train` would raise this error before its first step.
    """
    folder = Path("runs") / recipe.name if out is None else Path(out)
    taken = "" if resume or out is not None else reason_not_free(folder)
    if taken:
        notices, place = [taken, *recipe_warnings(recipe)], {}
    else:
        at = check_run(recipe, folder, resume=resume)
        recipe = as_begun(RunDirectory(folder), recipe) if resume else recipe
        notices = list(at.notices)
        if not resume:
            notices.append(f"{folder}: would start a new run")
        elif at.step < (recipe.train.steps or math.inf):
            notices.append(f"{folder}: would resume after step {at.step:,}")
        changes = [str(change) for change in at.changes]
        place = {"run_directory": folder, "step": at.step, "changes": changes}
    if (asked := recipe.parallel.processes) > 1:
        notices.append(f"needs {asked} processes; start them with --workers {asked} or torchrun")
    for line in notices:
        notify(line)
    found = estimate(recipe) | place
    steps = found["steps"]
    found["seconds"] *= max(0, steps - found.get("step", 0)) / steps
    return found
