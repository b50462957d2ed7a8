"""Build the step that trains a decoder, for a device and a precision."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from workhorse.devices.names import training_dtype
from workhorse.errors import WorkhorseError
from workhorse.execute.body import Execution, body_of
from workhorse.execute.lower.train import train_natively
from workhorse.execute.native_training.feedforward import Gemm
from workhorse.execute.native_training.vocabulary import replace_embeddings
from workhorse.execute.scoring import ScoringBody, freeze
from workhorse.execute.training import checkpoint_activations, compile_layers, compile_logprobs
from workhorse.native import Library, Operators, resolve
from workhorse.native.allocator import give_back_freed_memory
from workhorse.nn import Decoder, DecoderConfig
from workhorse.optim.groups import build_optimizer
from workhorse.optim.master_weights import MasterWeights, round_weights
from workhorse.parallel.config import UNDIVIDED, MicroBatches, ParallelismConfig
from workhorse.parallel.division.layers import divide_layers
from workhorse.parallel.division.parts import ModelPart
from workhorse.parallel.division.stages import divide_stages, one_forward_one_backward
from workhorse.parallel.division.teams import NO_TEAMS, Teams
from workhorse.parallel.processes.world import ALONE, World
from workhorse.train.objectives.balance import Balanced, Balancer, has_mixtures
from workhorse.train.objectives.objective import Divided, Objective, UncountedObjective, counts_here
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.speed import peak_flops
from workhorse.train.step.reduction import Reduction, ShardedReduction
from workhorse.train.step.step import LossScale, Precision, TrainingStep
from workhorse.transforms.float8 import multiply_in_float8


def build_step(
    decoder: Decoder,
    config: TrainConfig,
    device: torch.device,
    *,
    parallel: ParallelismConfig = UNDIVIDED,
    world: World = ALONE,
    teams: Teams = NO_TEAMS,
    whole: DecoderConfig | None = None,
) -> TrainingStep:
    """Build the step that trains a decoder with float32 weights.

    If training is in bfloat16, the decoder's weights are rounded to it, in place. On a CPU, build
    and run the step within `keep_freed_memory`; otherwise it is slower.

    Args:
        decoder: the decoder on `device`, with its initial weights. If ranks hold only parts of the
            weights, it must be on the device `meta`: this function then allocates this rank's
            parts, and the caller writes values through `MasterWeights.places`.
        config: the training settings; `fit_micro_batch` must have replaced `micro_batch_size:
            auto`.
        device: the device to train on.
        parallel: the parallelism settings; they determine how gradients are summed.
        world: the processes that compute each step: those of `parallel`, or one process that
            computes the whole step.
        teams: this rank's process groups for context, tensor and pipeline parallelism.
        whole: the config of the whole model if `decoder` is only a part of it; otherwise None.

    Returns:
        The step. It trains a copy of `decoder` in which modules are replaced. The copy has the same
        parameters, unless weights are divided among ranks.

    Raises:
        WorkhorseError: no parameter requires a gradient, or `execution=native` is set but there are
            no native operators.
    """
    if not any(parameter.requires_grad for parameter in decoder.parameters()):
        raise WorkhorseError("no weight has requires_grad=True; set it for the weights to train")
    dtype = training_dtype(config.dtype, device)
    exact = config.rollouts is not None and config.rollouts.exact
    operators = training_operators(device, dtype, config.execution, exact=exact)
    compiled = config.execution == "compiled"
    whole = whole or decoder.config
    # The copy fixes dtypes and thresholds when it is built, so weights are rounded before.
    low_bits = round_weights(decoder) if dtype == torch.bfloat16 else {}
    # Modules are replaced only in this copy; `decoder` keeps the reference implementation.
    body = body_of(decoder)
    # The objective registers hooks on routers, so it is built from the copy, which is executed.
    objective = _objective(body, config, teams, whole).train()
    # Modules are replaced by native ones by their exact class, so before classes are changed.
    if config.execution != "reference":
        if device.type == "cpu" and dtype == torch.bfloat16:
            replace_embeddings(body, operators.training)
        if device.type == "cpu" and dtype != torch.float16:
            train_natively(objective, operators, precision=config.matmul_precision, exact=exact)
    for model in objective.frozen_models():
        freeze(
            ScoringBody(model),
            operators,
            precision=config.matmul_precision,
            exact=exact,
            compiled=compiled,
        )
    # Ranks that divide a model exchange the results of native modules, so this comes after them.
    between = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    part = _take_part(objective, body, config, teams, whole, dtype=between)
    # Float8 GEMMs replace linear layers, also those that are divided among ranks.
    if config.fp8:
        multiply_in_float8(body)
    # The recomputation of a layer's activations must include all of the above.
    if config.activation_checkpointing:
        checkpoint_activations(body)
    # Sharding adds hooks to the layers, so these must be final, and replaces parameters.
    own = config.micro_batches(parallel)
    reduction = _divide(
        objective, body, parallel, world, whole, device=device, part=part, micro_batches=own
    )
    # The optimizer gets this rank's shard of each parameter.
    optimizer = build_optimizer(
        body,
        config.optimizer,
        low_bits,
        operators=operators.training,
        uniform=parallel.is_exact,
        compiled=compiled,
        part=part,
        trained=objective.trainable(),
    )
    if device.type == "cpu":
        give_back_freed_memory()
    divided = world.size > 1 or parallel.is_exact
    step = TrainingStep(
        objective,
        optimizer,
        device,
        precision=precision_of(config, device),
        scale=LossScale(enabled=dtype == torch.float16),
        micro_batch_size=own.size,
        turns=one_forward_one_backward if teams.stages is None else teams.stages.turns,
        grad_clip=config.grad_clip,
        reduction=reduction(optimizer.masters, config.seed) if divided else None,
        device_decides=device.type == "cuda",
    )
    # A compiled layer keeps the modules that it has now, so compilation comes last.
    if compiled:
        compile_layers(body)
        compile_logprobs(objective)
    body.config = whole  # callers use it like the whole model
    return step


def precision_of(config: TrainConfig, device: torch.device) -> Precision:
    """Return the precision of the passes of a training step."""
    in_float16 = training_dtype(config.dtype, device) == torch.float16
    return Precision(
        device, torch.float16 if in_float16 else torch.float32, config.matmul_precision
    )


def _take_part(
    objective: Objective,
    decoder: Decoder,
    config: TrainConfig,
    teams: Teams,
    whole: DecoderConfig,
    *,
    dtype: torch.dtype,
) -> ModelPart | None:
    """Add collectives to this rank's part of a model, for tensor and pipeline parallelism.

    Modules of `objective`, which contains the decoder, are changed in place. `whole` is the config
    of the whole model, `dtype` the dtype of the residual stream.

    Returns:
        A description of the part; None if the model is not divided.
    """
    if teams.layers is None and teams.stages is None:
        return None
    undivided = whole.build(device="meta")
    states = build_optimizer(undivided, config.optimizer).tensors()
    part = ModelPart(undivided, states, decoder, teams)
    if teams.stages is not None:
        divide_stages(objective, teams.stages, dtype)
    if teams.layers is not None:
        divide_layers(objective, whole, teams.layers)
    return part


def _divide(
    objective: Objective,
    decoder: Decoder,
    parallel: ParallelismConfig,
    world: World,
    whole: DecoderConfig,
    *,
    device: torch.device,
    part: ModelPart | None,
    micro_batches: MicroBatches,
) -> Callable[[MasterWeights, int], Reduction]:
    """Divide weights among the ranks, in place.

    Returns:
        A function that creates the reduction of gradients, from master weights and a seed.
    """
    if not world.lockstep:
        return partial(Reduction, world, parallel)
    from workhorse.parallel.division.layers import ExpertParallelGroup  # takes a second
    from workhorse.parallel.division.sharding import holders, reshard, shard

    experts = ExpertParallelGroup(world, parallel.expert, device) if parallel.expert > 1 else None
    if experts is not None:
        experts.divide(objective)
    trained = {name: own for name, own in decoder.named_parameters() if own.requires_grad}
    tied = parallel.pipeline > 1 and whole.head.tied
    held_by = holders(trained, world, parallel, part, experts, tied=tied)
    reduction = partial(Reduction, world, parallel, holders=held_by)
    if parallel.shard > 1:
        parts = [] if whole.head.tied else decoder.embedding.children()
        tables = [part for part in parts if isinstance(part, nn.Embedding)]
        exact_sums = shard(objective, [*tables, *decoder.layers], parallel, device, micro_batches)
        reduction = partial(
            ShardedReduction,
            world,
            parallel,
            exact_sums=exact_sums,
            reshard=partial(reshard, objective),
            holders=held_by,
        )
    if next(decoder.parameters()).is_meta:
        objective.to_empty(device=device)
        decoder.tie_weights()  # a parameter that was replaced is no longer tied
    return reduction


def _objective(
    decoder: Decoder, config: TrainConfig, teams: Teams, whole: DecoderConfig
) -> Objective:
    team = teams.sequences
    objective: Objective = config.objective.build(decoder, team)
    if not counts_here(objective, teams):
        objective = UncountedObjective(objective)
    if has_mixtures(whole):
        balancer = Balancer(
            decoder,
            whole,
            weight=config.balance_loss,
            rate=config.balance_rate,
            team=team,
            reports=teams.reports,
        )
        objective = Balanced(objective, balancer)
    return objective if team is None else Divided(objective, team)


def measured_peak(config: TrainConfig, device: torch.device) -> float:
    """Measure the floating-point operations per second of the GEMMs that training uses."""
    dtype = training_dtype(config.dtype, device)
    operators = training_operators(device, dtype, config.execution)
    multiply = Gemm(operators, config.matmul_precision)
    with Precision(device, dtype, config.matmul_precision).products():
        return peak_flops(device, dtype, multiply)


def training_operators(
    device: torch.device,
    dtype: torch.dtype,
    execution: Execution = "auto",
    *,
    exact: bool = False,
) -> Operators:
    """Return the native operators for training in a dtype on a device; waits for their compilation.

    With `exact`, they include those that `train_natively` needs for the bits of decoding steps.

    Raises:
        WorkhorseError: `execution` is `native` or `exact` is True, but there are no native
            operators; or `execution` does not fit `exact`.
    """
    if exact and execution in ("reference", "compiled"):
        raise WorkhorseError(
            f"rollouts.exact needs native operators, not train.execution={execution}; remove one "
            "of the two"
        )
    if execution == "reference":
        return Operators()
    if device.type != "cpu" or dtype == torch.float16:
        found = Operators()
        reason = f"none are for {dtype} on {device.type}".replace("torch.", "")
    else:
        others: tuple[Library, ...] = ("decoding", "steps") if exact else ()
        found = resolve("training", "matrix_unit", "vectors", *others, wait=True)
        reason = found.why_not.get("training", "")
    if execution == "native" and found.training is None:
        raise WorkhorseError(
            f"train.execution=native needs native operators: {reason}; set train.execution=auto"
        )
    for name in ("training", "vectors", "decoding", "steps") if exact else ():
        if getattr(found, name) is None:
            reason = found.why_not.get(name, reason)
            raise WorkhorseError(f"rollouts.exact needs native operators: {reason}; remove it")
    return found
