"""Building the step that trains a decoder, for a device and a precision."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from workhorse.devices.names import training_dtype
from workhorse.errors import WorkhorseError
from workhorse.execute.body import Execution, body_of
from workhorse.execute.native_training import Gemm, replace_embeddings, train_natively
from workhorse.execute.training import checkpoint_activations, compile_layers, compile_logprobs
from workhorse.native import Operators, resolve
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
from workhorse.train.recipe.recipe import TrainConfig
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
    """The step that trains a float32 decoder, whose weights it may round to bfloat16.

    On a CPU, build and run it within `keep_freed_memory`; otherwise it is slower.

    Args:
        decoder: on the device, with the initial weights; or, if they are to be divided, on the meta
            device: their parts are allocated, and `MasterWeights.places` takes the values.
        config: how it is trained, with what `fit_micro_batch` made of `micro_batch_size: auto`.
        device: where it is trained.
        parallel: how the gradients of the batch's parts are added up.
        world: the processes that have these parts: those of `parallel`, or one that has all.
        teams: of this process, where sequences or layers are divided.
        whole: the config of the model of which the decoder is this process's part; None: it has
            all.

    Returns:
        The step. Its objective's decoder is a body of the one given, with the same parameters
        unless these are divided.

    Raises:
        WorkhorseError: nothing is to be trained, or there are no native operators and
            `execution=native` asks for them.
    """
    if not any(parameter.requires_grad for parameter in decoder.parameters()):
        raise WorkhorseError("no weight takes a gradient; give requires_grad to those to train")
    dtype = training_dtype(config.dtype, device)
    operators = training_operators(device, dtype, config.execution)
    compiled = config.execution == "compiled"
    whole = whole or decoder.config
    # A body fixes types and thresholds when it is built, so weights are rounded before.
    low_bits = round_weights(decoder) if dtype == torch.bfloat16 else {}
    # All that follows replaces modules of a copy; the decoder that was given stays the reference.
    body = body_of(decoder)
    # The objective listens to routers, which must be those that run.
    objective = _objective(body, config, teams, whole).train()
    # Native modules know exact classes, so they come before what makes others of them.
    if config.execution != "reference":
        if device.type == "cpu" and dtype == torch.bfloat16:
            replace_embeddings(body, operators.training)
        if device.type == "cpu" and dtype != torch.float16:
            train_natively(objective, operators, precision=config.matmul_precision)
    # The parts of a divided model exchange what native modules compute.
    between = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    part = _take_part(objective, body, config, teams, whole, dtype=between)
    # Products in float8 take the place of linear layers, whoever else has parts of them.
    if config.fp8:
        multiply_in_float8(body)
    # A layer that computes its activations again must contain all of the above.
    if config.activation_checkpointing:
        checkpoint_activations(body)
    # Sharding hooks the layers as they will be called, and replaces parameters.
    own = config.micro_batches(parallel)
    reduction = _divide(
        objective, body, parallel, world, whole, device=device, part=part, micro_batches=own
    )
    # The optimizer takes what is left of each parameter in this process.
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
        precision=Precision(
            device,
            torch.float16 if dtype == torch.float16 else torch.float32,
            config.matmul_precision,
        ),
        scale=LossScale(enabled=dtype == torch.float16),
        micro_batch_size=own.size,
        turns=one_forward_one_backward if teams.stages is None else teams.stages.turns,
        grad_clip=config.grad_clip,
        reduction=reduction(optimizer.masters, config.seed) if divided else None,
        device_decides=device.type == "cuda",
    )
    # A compiled layer stays bound to the modules that it has now.
    if compiled:
        compile_layers(body)
        compile_logprobs(objective)
    body.config = whole  # to all who call it, it is the whole
    return step


def _take_part(
    objective: Objective,
    decoder: Decoder,
    config: TrainConfig,
    teams: Teams,
    whole: DecoderConfig,
    *,
    dtype: torch.dtype,
) -> ModelPart | None:
    """Let the part of a model that this process has compute together with the others.

    Args:
        objective: holds the part.
        decoder: is the part.
        config: how it is trained.
        teams: have the other parts.
        whole: the config of all of it.
        dtype: of the residual stream.
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
    """Divide weights among the processes; returns what makes the sum of their gradients."""
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
    """Floating-point operations per second of the gemms that training uses."""
    dtype = training_dtype(config.dtype, device)
    operators = training_operators(device, dtype, config.execution)
    multiply = Gemm(operators, config.matmul_precision)
    with Precision(device, dtype, config.matmul_precision).products():
        return peak_flops(device, dtype, multiply)


def training_operators(
    device: torch.device, dtype: torch.dtype, execution: Execution = "auto"
) -> Operators:
    """The native operators that training in a dtype can use on a device; waits for the compiler.

    Raises:
        WorkhorseError: `native` asks for them, and there are none.
    """
    if execution == "reference":
        return Operators()
    if device.type != "cpu" or dtype == torch.float16:
        found = Operators()
        reason = f"none are for {dtype} on {device.type}".replace("torch.", "")
    else:
        found = resolve("training", "matrix_unit", "vectors", wait=True)
        reason = found.why_not.get("training", "")
    if execution == "native" and found.training is None:
        raise WorkhorseError(
            f"train.execution=native needs native operators: {reason}; set it to auto"
        )
    return found
