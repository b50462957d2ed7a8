"""The memory and time that a recipe will need, and what training it would do."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workhorse.checkpoints import RunDirectory
from workhorse.data import Batch, iterate_texts
from workhorse.devices.memory import available
from workhorse.devices.names import use_threads
from workhorse.memory.account import account
from workhorse.memory.capacity import fit_micro_batch, recordable
from workhorse.memory.device_memory import device_memory
from workhorse.models.describe import active_parameters, exports_as, flops_per_token
from workhorse.nn import DecoderConfig
from workhorse.optim.groups import parameters_by_role
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.parallel.processes import environment
from workhorse.tokenizers import train_tokenizer
from workhorse.train.check import check_length, check_recipe, remarks_on
from workhorse.train.minutes import after_timing, as_begun, steps_within, with_steps
from workhorse.train.recipe.recipe import Recipe, TrainConfig
from workhorse.train.run import rehearse, why_taken
from workhorse.train.step.build import build_step, measured_peak

TIMED_BYTES = 2**30
TIMED_SECONDS = 1.0
"""Steps are timed if one needs at most so many bytes, and its arithmetic takes at most so many
seconds at the rate of a large gemm."""
TIMED_STEPS = 3
MATRIX_PRODUCT = "matrix product"


def estimate(recipe: Recipe) -> dict[str, Any]:
    """Parameters, memory and time of a recipe. Writes nothing.

    Returns:
        `recipe` (with its defaults, its model in full), the `device`, `config` (of the decoder, in
        full), `exports_as` (the class of transformers that can hold it, or the differences from the
        nearest), `parameters` (`total`, `active` per token, and by role), `memory` (bytes of a
        step in the fullest process, see `account`; of float16 those of float32, see `recordable`;
        on a CPU all processes are taken to share this machine), `processes`, `micro_batch_size`
        (what `auto` comes to now), `steps` (what `train.minutes` comes to, if given), `tokens` of
        the whole run, `flops_per_token`, `seconds`, and `seconds_from`: `"steps"` if steps were
        timed, on random tokens and without text generation and validation, or, for a large model,
        `"matrix product"`: the time of the arithmetic at the rate of the fastest gemm, which no
        training reaches.

    Raises:
        WorkhorseError: `train` would refuse the recipe before its first step.
    """
    device = check_recipe(recipe)
    config = recipe.train
    check_length(recipe)
    if config.threads:
        use_threads(config.threads)
    decoder_config = recipe.decoder_config(vocab_size_of(recipe))
    decoder = decoder_config.build(config.kernel, device="meta")
    active = active_parameters(decoder_config)
    flops = flops_per_token(decoder, config.seq_len)
    packed = recipe.data.packed
    parallel = recipe.parallel
    config = fit_micro_batch(decoder_config, config, device, packed=packed, parallel=parallel)
    own = device_memory(decoder_config, recordable(config, device), device, parallel, packed=packed)
    free = available(device)
    if free is not None and device.type == "cpu":
        free //= environment.count_here(parallel.processes)
    memory = account(own.held, own.activations, own.peak, free)
    roles = {
        role: sum(parameter.numel() for parameter in parameters.values())
        for role, parameters in parameters_by_role(decoder).items()
    }
    seconds, source = flops * config.tokens_per_step / measured_peak(config, device), MATRIX_PRODUCT
    if own.total <= TIMED_BYTES and memory["fits"] is not False and seconds <= TIMED_SECONDS:
        seconds, source = time_steps(config, decoder_config, device, parallel), "steps"
    if config.minutes is not None:
        config = with_steps(config, steps_within(config, after_timing(config.minutes), seconds))
    steps = config.length
    return {
        "recipe": recipe.written_out().to_dict(),
        "config": decoder_config.to_dict(),
        "exports_as": exports_as(decoder_config),
        "parameters": {"total": sum(roles.values()), "active": active, **roles},
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
    """The largest vocabulary that the recipe's tokenizer can have.

    If the config does not say, the tokenizer is trained on the text, in memory.
    """
    size = getattr(recipe.tokenizer, "vocab_size", None)
    if size is not None:
        return size
    return train_tokenizer(recipe.tokenizer, iterate_texts(recipe.data)).vocab_size


def time_steps(
    train: TrainConfig,
    config: DecoderConfig,
    device: torch.device,
    parallel: ParallelismConfig = UNDIVIDED,
) -> float:
    """The seconds of the fastest of a few steps on random tokens; the first does not count.

    One process does all of each, as it would with the whole machine to itself.
    """
    train = fit_micro_batch(config, train, device, parallel=parallel)
    tokens = torch.randint(config.vocab_size, (train.batch_size, train.seq_len))
    batch = Batch(tokens, tokens, None, torch.zeros(train.batch_size, dtype=torch.int64))
    times = []
    step = build_step(config.build(train.kernel, device=device), train, device, parallel=parallel)
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
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """What `train` would do with a recipe, and the resources it would need. Writes nothing.

    Args:
        recipe: to be trained.
        out: the run directory; None for `runs/NAME`, with a line to `tell` if that is taken.
        resume: continue the run in `out`.
        tell: called with each line that `train` would emit as a notice, before steps are timed.

    Returns:
        The result of `estimate`; and, unless `runs/NAME` is taken, `run_directory`, the `step`
        after which the run would continue (0: it would begin) and the `changes` of the recipe;
        `seconds` are then those of the steps that are left.

    Raises:
        WorkhorseError: `train` would refuse before its first step.
    """
    folder = Path("runs") / recipe.name if out is None else Path(out)
    taken = "" if resume or out is not None else why_taken(folder)
    if taken:
        notices, place = [taken, *remarks_on(recipe)], {}
    else:
        at = rehearse(recipe, folder, resume=resume)
        recipe = as_begun(RunDirectory(folder), recipe) if resume else recipe
        notices = list(at.notices)
        if not resume:
            notices.append(f"{folder}: a new run would begin here")
        elif at.step < (recipe.train.steps or math.inf):
            notices.append(f"{folder}: would go on after step {at.step:,}")
        changes = [str(change) for change in at.changes]
        place = {"run_directory": folder, "step": at.step, "changes": changes}
    if (asked := recipe.parallel.processes) > 1:
        notices.append(f"takes {asked} processes, by --workers {asked} or torchrun")
    for line in notices:
        tell(line)
    found = estimate(recipe) | place
    steps = found["steps"]
    found["seconds"] *= max(0, steps - found.get("step", 0)) / steps
    return found
