"""Tensor parallelism with sequence parallelism, and expert parallelism.

In tensor parallelism, each rank has some heads, hidden features and tokens of the vocabulary
(`part_of_model`). Between layers, it has consecutive tokens of each sequence (2205.05198 §4.2.2).
Before attention and feed-forward, a rank gathers the tokens of all ranks. Afterwards the outputs
are summed over the ranks, and each rank keeps its own tokens. A rank's gradient of a replicated
weight, such as a norm's gain, is only a part of the gradient, so it is summed over the ranks.

In expert parallelism, each rank has some experts. It sends tokens that are routed to other experts
to their ranks, and gets the outputs back (2006.16668 §3). Tokens are sorted by expert, so the
tokens for one rank are contiguous.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workhorse.nn import DecoderConfig, TokenLogprobs
from workhorse.nn.attention.masks import AttentionPattern
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.nn.blocks import Block
from workhorse.nn.cache.view import CacheEntry
from workhorse.nn.context import Context
from workhorse.nn.decoder import decoders_in
from workhorse.nn.embedding import Head
from workhorse.nn.experts.mixture import Experts, GroupedLinear, Groups, MixtureOfExperts
from workhorse.nn.facts import division_of
from workhorse.nn.logprobs import Vocabulary
from workhorse.nn.norms import Norm
from workhorse.nn.shapes import Hidden, Logits, Positions, Tokens
from workhorse.nn.surgery import as_subclass, mixin_class, replace_modules
from workhorse.parallel.config import share_of
from workhorse.parallel.processes.group import Group, summed, with_gradient
from workhorse.parallel.processes.world import World
from workhorse.parallel.shards import is_sharded, local


class TensorParallelGroup:
    """The tensor-parallel group: ranks that divide every layer.

    Args:
        group: the ranks.
        vocabulary: vocabulary size of the whole model.

    Attributes:
        generating: True during generation. Sequences are then not divided between layers, and
            every rank gets all logits.
    """

    def __init__(self, group: Group, vocabulary: int) -> None:
        self.group, self.vocabulary = group, vocabulary
        self.generating = False

    def tokens_of(self, rank: int) -> range:
        """Return the range of vocabulary ids that a rank holds."""
        return share_of(self.vocabulary, self.group.size, rank)

    @property
    def most_tokens(self) -> int:
        """Maximum number of vocabulary ids on a rank."""
        return -(-self.vocabulary // self.group.size)

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of x, (batch, seq, …); all of x during generation."""
        return x if self.generating else x.chunk(self.group.size, dim=1)[self.group.rank]

    def copy_to_ranks(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks, (batch, seq, …); reduce-scatter the gradient."""
        return x if self.generating else with_gradient(self.gathered, self.split, x)

    def reduce_from_ranks(self, y: Tensor) -> Tensor:
        """Reduce-scatter: sum y over the ranks and keep this rank's tokens; gather the gradient."""
        return self.group.add(y) if self.generating else with_gradient(self.split, self.gathered, y)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: sum x over the ranks. The gradient is all-reduced too."""
        return with_gradient(self.group.add, self.group.add, x)

    def gathered(self, own: Tensor) -> Tensor:
        """All-gather the tokens of all ranks, (batch, seq, …), in order."""
        return torch.cat(self.group.gather(own).unbind(), dim=1)

    def split(self, x: Tensor) -> Tensor:
        """Reduce-scatter: sum x, (batch, seq, …), over the ranks and keep this rank's tokens."""
        return summed(self.group.exchange(torch.stack(x.chunk(self.group.size, dim=1))))


def divide_layers(objective: nn.Module, config: DecoderConfig, team: TensorParallelGroup) -> None:
    """Make this rank's part of a model communicate with the other ranks, in place.

    Args:
        objective: a module that contains a decoder built from `part_of_model`.
        config: the config of the whole model.
        team: the tensor-parallel group.
    """
    (decoder,) = decoders_in(objective)
    scores = [part for part in objective.modules() if isinstance(part, TokenLogprobs)]
    embedding = decoder.embedding
    changes: dict[nn.Module, type[_OfTeam]] = {
        **{decoder.head: _Head, embedding: _Embedding},
        **dict.fromkeys(scores, _Logprobs),
        **{part: _Table for part in embedding.children() if isinstance(part, nn.Embedding)},
    }
    patterns: dict[nn.Module, AttentionPattern] = {}
    for number, block in decoder.layers.named_children():
        layer, block = int(number), cast(Block, block)  # noqa: PLW2901
        name = config.layer_names()[layer]
        mixes = config.blocks[name].mixture is not None
        changes |= {block: _Block, block.attention: _SubLayer}
        changes[block.feed_forward] = _Mixture if mixes else _SubLayer
        patterns[block.attention] = _pattern(block.attention, config, name, layer, team)
    for module in decoder.modules():
        for name, way in division_of(module).items():
            part = getattr(module, name)
            if way == "features" and not isinstance(part, nn.Identity):
                changes[part] = _Norm
            elif way == "row" and part.bias is not None:
                changes[part] = _LastProduct if part.weight.ndim == 2 else _LastProducts  # noqa: PLR2004

    def choose(module: nn.Module) -> nn.Module:
        if module not in changes:
            return module
        options = {"pattern": patterns[module]} if module in patterns else {}
        kind = mixin_class("Divided", changes[module], type(module))
        return as_subclass(module, kind, team=team, **options)

    replace_modules(objective, choose)


def _pattern(
    attention: SelfAttention,
    config: DecoderConfig,
    name: str,
    layer: int,
    team: TensorParallelGroup,
) -> AttentionPattern:
    """Return the attention pattern of a layer, with the ALiBi slopes of this rank's heads."""
    whole = config.blocks[name].grouped
    if whole is None:
        return attention.pattern
    heads = slice(team.group.rank * attention.n_heads, (team.group.rank + 1) * attention.n_heads)
    slopes = whole.pattern(config.d_model, layer).alibi_slopes[heads]
    return replace(attention.pattern, alibi_slopes=slopes)


class _OfTeam(nn.Module):
    """A mixin for modules that are divided among a tensor-parallel group."""

    team: TensorParallelGroup


class _Block(_OfTeam, Block):
    def attend(self, x: Hidden, context: Context | None, cache: CacheEntry | None) -> Hidden:
        return super().attend(self.team.copy_to_ranks(x), context, cache)

    def feed(self, x: Hidden, context: Context | None, cache: CacheEntry | None) -> Hidden:
        return super().feed(self.team.copy_to_ranks(x), context, cache)


class _SubLayer(_OfTeam):
    def forward(self, x: Hidden, *others: Any) -> Hidden:
        return self.team.reduce_from_ranks(super().forward(x, *others))


class _Mixture(_OfTeam, MixtureOfExperts):
    """A mixture of experts that sums its output over the ranks before the output norm."""

    def mix(self, x: Hidden) -> Hidden:
        return self.team.reduce_from_ranks(super().mix(x))


class _LastProduct(_OfTeam):
    """An output projection with outputs that are summed over the ranks.

    Only rank 0 adds the bias, so that the sum contains it once.
    """

    @property
    def bias(self) -> Tensor:
        bias = self._parameters["bias"]
        assert bias is not None
        asks_fsdp = is_sharded(bias)  # FSDP reads the parameter itself between passes
        if self.team.group.is_first or asks_fsdp:
            return bias
        return bias * 0


class _LastProducts(_OfTeam, GroupedLinear):
    """The output projections of experts. Only rank 0 adds the bias; see `_LastProduct`."""

    def product(self, x: Tensor, groups: Groups, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return super().product(x, groups, weight, bias if self.team.group.is_first else bias * 0)


class _Norm(_OfTeam, Norm):
    def forward(self, x: Tensor) -> Tensor:
        width = self.team.group.size * x.shape[-1]
        wide = x.float()
        if self.facts.centred:
            wide = wide - self.team.sum(wide.sum(-1, keepdim=True)) / width
        square = self.team.sum(wide.square().sum(-1, keepdim=True)) / width
        y = wide * torch.rsqrt(square + self.eps)
        y = y.to(x.dtype) if self.facts.rounds_normal else y
        y = y if self.weight is None else y * (self.weight.to(y.dtype) + self.offset)
        return (y if self.bias is None else y + self.bias.to(y.dtype)).to(x.dtype)


class _Embedding(_OfTeam):
    def forward(self, tokens: Tokens, positions: Positions) -> Hidden:
        return super().forward(tokens, self.team.own(positions))


class _Table(_OfTeam):
    """An embedding table with the vocabulary divided among the ranks.

    It returns the embeddings of this rank's tokens of the sequence.
    """

    def forward(self, tokens: Tokens) -> Hidden:
        here, row = _here(tokens, self.team)
        return self.team.reduce_from_ranks(super().forward(row) * here[..., None])


class _Head(_OfTeam):
    """The output head, with the vocabulary divided among the ranks; used for generation.

    It gathers the logits of all ranks. A loss is computed by `_Logprobs` without gathering them.
    """

    linear = True

    def forward(self, x: Hidden) -> Logits:
        team = self.team
        own = super().forward(x)
        assert team.generating, "TokenLogprobs computes the loss"
        padded = F.pad(own, (0, team.most_tokens - own.shape[-1]))
        tokens = [team.tokens_of(rank) for rank in range(team.group.size)]
        logits = zip(team.group.gather(padded), tokens, strict=True)
        return torch.cat([one[..., : len(its)] for one, its in logits], dim=-1)


class _Logprobs(_OfTeam, TokenLogprobs):
    """Log-probabilities over the full vocabulary; each rank computes only its own logits.

    All ranks get the same results.
    """

    def read(self, x: Hidden, head: Head) -> Tensor:
        return self.team.copy_to_ranks(super().read(x, head))

    @property
    def vocabulary(self) -> Vocabulary:
        return _PartOfVocabulary(self.team)


class _PartOfVocabulary(Vocabulary):
    def __init__(self, team: TensorParallelGroup) -> None:
        self.team = team

    def most(self, own: int) -> int:
        del own
        return self.team.most_tokens

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _here(targets[:, None], self.team)

    def largest(self, of_rows: Tensor) -> Tensor:
        return self.team.group.largest(of_rows)

    def add(self, of_rows: Tensor) -> Tensor:
        return self.team.group.add(of_rows)


def _here(tokens: Tensor, team: TensorParallelGroup) -> tuple[Tensor, Tensor]:
    """Find the tokens that belong to this rank's part of the vocabulary.

    Returns:
        A mask of these tokens, and their indices in this part (0 for all other tokens).
    """
    own = team.tokens_of(team.group.rank)
    here = (tokens >= own.start) & (tokens < own.stop)
    return here, (tokens - own.start).where(here, 0)


class ExpertParallelGroup:
    """The expert-parallel group: ranks that divide the experts of every mixture of experts.

    Args:
        world: the processes of the run; all must create their group together.
        ways: number of ranks in a group, a divisor of `World.replicas`.
        device: the device of the weights.
    """

    def __init__(self, world: World, ways: int, device: torch.device) -> None:
        ranks = torch.arange(world.size).view(-1, ways, world.parallel.team)
        names = ("team", "expert", "member")
        self.mesh: DeviceMesh = DeviceMesh(device.type, ranks, mesh_dim_names=names)["expert"]
        self.group = Group(self.mesh.get_local_rank(), ways, self.mesh.get_group())

    def owns(self, parameter: Tensor) -> bool:
        """True if a parameter belongs to experts that this group divides."""
        return is_sharded(parameter) and parameter.device_mesh == self.mesh

    def divide(self, root: nn.Module) -> None:
        """Keep only this rank's experts of every mixture of experts, in place."""

        def choose(module: nn.Module) -> nn.Module:
            if isinstance(module, GroupedLinear):
                made = as_subclass(module, mixin_class("Divided", _DividedLinear, type(module)))
                for name, weight in list(made.named_parameters(recurse=False)):
                    setattr(made, name, self._part(weight))
                return made
            if isinstance(module, Experts):
                kind = mixin_class("Divided", _DividedExperts, type(module))
                own = module.n_experts // self.group.size
                return as_subclass(module, kind, team=self, n_experts=own)
            return module

        replace_modules(root, choose)

    def _part(self, weight: nn.Parameter) -> nn.Parameter:
        from torch.distributed.tensor import DTensor, Shard  # importing it takes seconds

        own = weight.detach().chunk(self.group.size)[self.group.rank].clone()
        part = DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
        return nn.Parameter(part, requires_grad=weight.requires_grad)


class _DividedLinear(GroupedLinear):
    """A mixin for the linear layers of experts that are divided among the ranks."""

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        return self.product(x, groups, local(self.weight), bias)


class _DividedExperts(Experts):
    """A mixin for the experts of a mixture of experts, divided among the ranks.

    `n_experts` is the number of experts on this rank.
    """

    team: ExpertParallelGroup

    def of_sorted(self, rows: Tensor, experts: Tensor) -> Tensor:
        group, own = self.team.group, self.n_experts
        ways = group.size
        counts = torch.bincount(experts, minlength=ways * own).view(ways, own)
        arriving = group.exchange(counts)
        sends, receives = counts.sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
        there = partial(group.exchange, sends=sends, receives=receives)
        back = partial(group.exchange, sends=receives, receives=sends)
        arrived = with_gradient(there, back, rows)
        of_row = torch.arange(own, device=rows.device).repeat(ways)
        sorted_experts, order = of_row.repeat_interleave(arriving.flatten()).sort(stable=True)
        y = super().of_sorted(arrived[order], sorted_experts)
        y = torch.empty_like(y).index_copy_(0, order, y)
        return with_gradient(back, there, y)
