"""Compares passes of several ranks that divide a model or its sequences with one process."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nn.grid import error, make, random_tokens
from tests.parallel.forked import start
from workhorse.config.base import ConfigError
from workhorse.data import Batch
from workhorse.execute.training import checkpoint_activations
from workhorse.nn import IGNORE, Decoder, DecoderConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import Routing
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.layers import ExpertParallelGroup, divide_layers
from workhorse.parallel.division.parts import ModelPart, check_divisible
from workhorse.parallel.division.sequences import ContextParallelGroup
from workhorse.parallel.division.stages import divide_stages
from workhorse.parallel.division.teams import Teams, make_teams
from workhorse.parallel.processes.world import World
from workhorse.parallel.shards import local
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.objectives.objective import Divided, Objective, UncountedObjective, counts_here
from workhorse.train.objectives.policy import PolicyBatch, PolicyConfig
from workhorse.train.objectives.preferences import DpoConfig, KtoConfig, OrpoConfig
from workhorse.train.objectives.reward import RewardConfig

ROWS, COLUMNS = 2, 12
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 7 + [2] * 2, [4] * 12])
"""Document ids: one document spans two ranks, one spans all ranks."""


def batch_of(config: DecoderConfig, documents: Tensor | None) -> Batch:
    rows = random_tokens(config, ROWS, COLUMNS + 1)
    targets = rows[:, 1:].clone()
    targets[0, 4] = targets[1, -1] = IGNORE
    one = torch.zeros(ROWS, dtype=torch.int64)
    values = torch.tensor([1.0, 0.0])
    old = torch.full(targets.shape, -3.0)
    return PolicyBatch(
        *(rows[:, :-1], targets, documents, one),
        group=one,
        values=values,
        reference=-40 * values,
        old_logprobs=old,
        advantages=1 - 3 * values,
        reference_tokens=old - 1,
    )


def pass_over(decoder: Decoder, objective: Objective, batch: Batch) -> list[Tensor]:
    """Loss, token count and the gradient of every weight."""
    decoder.zero_grad()
    outcome = objective(batch)
    outcome.loss.backward()
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for weight in decoder.parameters()
    ]
    return [outcome.loss.detach(), outcome.count.float(), *gradients]


def worst_of_experts(world: World, chosen: list[int]) -> float:
    """Largest error of outputs and gradients if each rank routes all its tokens to one expert."""
    torch.manual_seed(0)
    config = MoEConfig(n_experts=2 * world.size, top_k=1, d_ff=8, bias=True)
    whole = config.build(8)
    with torch.no_grad():
        for weight in whole.parameters():
            weight.normal_()
    own = deepcopy(whole)
    team = ExpertParallelGroup(world, world.size, torch.device("cpu"))
    team.divide(own)
    x = torch.randn(world.size, 5, 8)
    found: list[tuple[Tensor, Tensor]] = []
    for rank, expert in enumerate(chosen):
        routing = Routing(torch.full((5, 1), expert), torch.ones(5, 1), torch.ones(5, 1))
        y = whole.experts(x[rank], routing)
        y.square().sum().backward()
        if rank == world.rank:
            part = own.experts(x[rank], routing)
            found.append((part, y))
    found[0][0].square().sum().backward()
    for weight, part in zip(whole.experts.parameters(), own.experts.parameters(), strict=True):
        assert team.owns(part)
        assert part.grad is not None
        assert weight.grad is not None
        found.append((local(part.grad), weight.grad.chunk(world.size)[world.rank]))
    return max(error(ours, expected) for ours, expected in found)


def worst_of_parts(
    teams: Teams,
    config: DecoderConfig,
    documents: Tensor | None,
    make_objective: Callable[[Decoder, ContextParallelGroup | None], Objective],
) -> float:
    """Largest error of the loss and the gradients, relative to the largest element or to 1."""
    whole, batch = make(config), batch_of(config, documents)
    alone = pass_over(whole, make_objective(whole, None), batch)
    decoder = teams.build(config, "auto", "cpu").train(whole.training)
    part = ModelPart(config.build(device="meta"), {}, decoder, teams)
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(part.cuts[name].of(weights[part.cuts[name].name]))
    objective = make_objective(decoder, teams.sequences)
    if teams.stages is not None:
        divide_stages(objective, teams.stages, torch.float32)
    if teams.layers is not None:
        divide_layers(objective, config, teams.layers)
    if documents is None:
        checkpoint_activations(decoder)
    if not counts_here(objective, teams):
        objective = UncountedObjective(objective)
    if teams.sequences is not None:
        objective = Divided(objective, teams.sequences)
    loss, count, *gradients = pass_over(decoder, objective, batch)
    summed = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for cut, gradient in zip(part.cuts.values(), gradients, strict=True):
        cut.of(summed[cut.name]).copy_(gradient)
    together = [loss, count, *summed.values()]
    for tensor in together:
        dist.all_reduce(tensor)
    assert torch.equal(together[1], alone[1])
    return max(error(ours, expected) for ours, expected in zip(together, alone, strict=True))


OBJECTIVES = (
    lambda decoder, team: NextToken(decoder, team=team),
    DpoConfig(sft_weight=0.1).build,
    KtoConfig().build,
    OrpoConfig().build,
    RewardConfig(token=3).build,
    PolicyConfig(clip_high=0.2, kl_weight=0.1, entropy_weight=0.1).build,
    PolicyConfig(ratio="sequence", clip="weight", denominator="sequences").build,
)
"""An objective that sums over tokens, and those that sum over whole sequences or pairs."""


def compare_parts(
    rank: int,
    folder: str,
    meshes: list[ParallelismConfig],
    configs: list[DecoderConfig],
    turns: list[list[Tensor | None]],
) -> None:
    """Run one rank of the comparison; rank 0 writes the differences to the folder.

    Args:
        rank: the rank.
        folder: the folder for the rendezvous.
        meshes: parallelism settings, all with the same number of processes.
        configs: configs of decoders; those that cannot be divided are skipped.
        turns: the document ids of the batches, for each decoder in turn.
    """
    torch.set_num_threads(1)
    meeting, size = f"file://{folder}/meeting-of-parts", meshes[0].processes
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    try:
        world = World(rank, size, ParallelismConfig(data=size))
        found: dict[int, float] = {}
        for number, (config, rows) in enumerate(zip(configs, cycle(turns), strict=False)):
            for parallel in meshes:
                try:
                    check_divisible(config, "auto", parallel)
                except ConfigError:
                    continue
                teams = make_teams(world, parallel, config.vocab_size)
                of = partial(worst_of_parts, teams, config)
                worst = max(
                    of(documents, OBJECTIVES[number % len(OBJECTIVES)]) for documents in rows
                )
                found[number] = max(worst, found.get(number, 0.0))
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/differences-of-parts")


def check_parts(
    folder: Path,
    meshes: list[ParallelismConfig],
    configs: list[DecoderConfig],
    turns: list[list[Tensor | None]],
) -> None:
    """Assert that divided decoders give the same results as whole ones."""
    apart = mkdtemp(dir=folder)  # a new folder for the rendezvous
    start(compare_parts, (apart, meshes, configs, turns), meshes[0].processes)
    found = torch.load(f"{apart}/differences-of-parts")
    assert len(found) > len(configs) // 2
    for number, difference in found.items():
        assert difference < 1e-5, configs[number]


def compare_experts(rank: int, folder: str, members: int) -> None:
    """Run one rank with divided experts; rank 0 writes the difference to the folder."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-of-experts"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=members)
    try:
        world = World(rank, members, ParallelismConfig(data=members))
        worst = max(worst_of_experts(world, chosen) for chosen in ([5, 5, 5], [0, 3, 1]))
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(worst, f"{folder}/difference-of-experts")


def check_experts(folder: Path) -> None:
    """Assert that divided experts match whole ones if one rank or each rank has the tokens."""
    start(compare_experts, (str(folder), 3), 3)
    assert torch.load(folder / "difference-of-experts") < 1e-6
