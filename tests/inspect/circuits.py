"""Small circuits with known edges: decoders with weights set by hand, beside random ones.

The residual stream is divided into spaces of one-hot vectors: the token, its position, two scratch
spaces and the output. The heads and neurons that a circuit does not use have random weights: they
read all spaces and write a little into all of them, so no edge has exactly no effect.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.inspect import Edges, Place
from workhorse.nn import Decoder, DecoderConfig

VOCAB, LENGTH, HEADS, WIDTH, NEURONS = 8, 8, 3, 16, 40
TOKEN, POSITION, A, B, OUT = (slice(start, start + 8) for start in range(0, 40, 8))
START, LAST = 0, LENGTH - 1
SHARP, NOISE = 12.0, 0.04
ONES = torch.ones(1, 8)
EMBEDDING, LOGITS = Place("embedding"), Place("head.x")
Edge = tuple[Place, Place]


@dataclass(frozen=True)
class Circuit:
    """A decoder with a task, and the edges that its tokens take.

    Attributes:
        decoder: the decoder.
        clean: tokens with the answer, (batch, seq).
        corrupt: other tokens, (batch, seq).
        answers: the tokens that the decoder gives after `clean`, (batch).
        edges: the edges that carry what differs between `clean` and `corrupt`.
    """

    decoder: Decoder
    clean: Tensor
    corrupt: Tensor
    answers: Tensor
    edges: set[Edge]

    def metric(self, logits: Tensor) -> Tensor:
        """The answers' logits above the mean of all logits."""
        last = logits[:, -1]
        return (last.gather(-1, self.answers[:, None]).squeeze(-1) - last.mean(-1)).mean()


def auroc(edges: Edges, true: set[Edge]) -> float:
    """Probability that a true edge has a larger absolute score than another; ties count half."""
    pairs = {
        (s, r): edges.scores[i, j].abs().item()
        for i, s in enumerate(edges.sources)
        for j, r in enumerate(edges.receivers)
        if not edges.scores[i, j].isnan()
    }
    assert true <= pairs.keys()
    good = torch.tensor([pairs[edge] for edge in true])[:, None]
    rest = torch.tensor([score for edge, score in pairs.items() if edge not in true])
    return ((good > rest).float() + (good == rest).float() / 2).mean().item()


class Builder:
    """Sets the weights of a decoder with random heads and neurons, part by part."""

    def __init__(self, layers: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.decoder = DecoderConfig.from_dict(
            {
                "vocab_size": VOCAB,
                "d_model": 40,
                "n_layers": layers,
                "max_seq_len": LENGTH,
                "embedding": {"position": {"kind": "learned"}},
                "blocks": {
                    "main": {
                        "kind": "pre_norm",
                        "norm": {"kind": "none"},
                        "attention": {"n_heads": HEADS, "head_dim": WIDTH, "scale": 1.0},
                        "feed_forward": {
                            "kind": "mlp",
                            "d_ff": NEURONS,
                            "activation": "relu",
                            "bias": True,
                        },
                    }
                },
            }
        ).build()
        for name, weight in self.decoder.named_parameters():
            size = NOISE / layers if "out_proj" in name or "down_proj" in name else 0.5
            self.set(name, size * torch.randn(weight.shape, generator=self.random))
        table = torch.zeros(VOCAB, 40)
        table[:, TOKEN] = torch.eye(8)
        self.set("embedding.tokens.weight", table)
        self.set("embedding.positions.table.weight", table.roll(8, 1))
        self.set("head.proj.weight", table.roll(32, 1))
        self.edges: set[Edge] = set()

    def set(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self.decoder.get_parameter(name).copy_(value)

    def head(
        self,
        layer: int,
        head: int,
        scores: Iterable[tuple[slice, Tensor, slice, Tensor]],
        moves: tuple[slice, Tensor, slice],
    ) -> None:
        """Set a head.

        Args:
            layer: index of the layer.
            head: index of the head.
            scores: terms of its scores: the query's space, its matrix (n, 8), the key's space, its
                matrix (n, 8).
            moves: the space that it reads, the matrix (to, from), the space that it writes.
        """
        q, k, v, out = (torch.zeros(WIDTH, 40) for _ in range(4))
        row = 0
        for of_query, query, of_key, key in scores:
            rows = slice(row, row + len(query))
            q[rows, of_query], k[rows, of_key] = SHARP * query, key
            row = rows.stop
        v[:8, moves[0]], out[:8, moves[2]] = torch.eye(8), moves[1].T
        own = slice(head * WIDTH, head * WIDTH + WIDTH)
        for letter, value in (("q", q), ("k", k), ("v", v)):
            name = f"layers.{layer}.attention.{letter}_proj.weight"
            self.decoder.get_parameter(name).data[own] = value
        name = f"layers.{layer}.attention.out_proj.weight"
        self.decoder.get_parameter(name).data[:, own] = out.T

    def neurons(
        self, layer: int, inputs: Tensor, bias: Tensor, outputs: Tensor, to: slice = OUT
    ) -> None:
        """Set the first neurons of a layer: inputs (n, 40), bias (n), outputs (n, 8)."""
        own, name = slice(len(inputs)), f"layers.{layer}.feed_forward"
        weight = self.decoder.get_parameter
        weight(f"{name}.up_proj.weight").data[own] = inputs
        weight(f"{name}.up_proj.bias").data[own] = bias
        weight(f"{name}.down_proj.weight").data[:, own] = 0
        weight(f"{name}.down_proj.weight").data[to, own] = outputs.T

    def join(self, *edges: Edge) -> None:
        self.edges |= set(edges)

    def done(self, clean: Tensor, corrupt: Tensor, answers: Tensor) -> Circuit:
        return Circuit(self.decoder, clean, corrupt, answers, self.edges)

    def tokens(self, batch: int = 32) -> Tensor:
        """Sequences of different tokens after the first, which is `START`, (batch, seq)."""
        order = torch.rand(batch, VOCAB - 1, generator=self.random).argsort(-1) + 1
        return torch.cat((torch.full((batch, 1), START), order), 1)

    def permutation(self) -> Tensor:
        """A matrix (to, from) that permutes all tokens except `START`, which becomes zero."""
        order = torch.randperm(VOCAB - 1, generator=self.random) + 1
        return torch.cat((torch.zeros(8, 1), torch.eye(8)[:, order]), 1)


def out(layer: int, head: int) -> Place:
    return Place(f"layers.{layer}.attention.kernel", head)


def reads(layer: int, head: int, letter: str) -> Place:
    return Place(f"layers.{layer}.attention.kernel.{letter}", head)


def fed(layer: int) -> Place:
    return Place(f"layers.{layer}.feed_forward.x")


def feeds(layer: int) -> Place:
    return Place(f"layers.{layer}.feed_forward_branch")


COPY = torch.diag(torch.tensor([0.0, *[1.0] * 7]))  # of all tokens except the first
ONLY_START = torch.eye(8)[:1]
SAME = (TOKEN, COPY[1:], TOKEN, torch.eye(8)[1:])  # attend to the query's token
REST = (POSITION, 0.5 * ONES, TOKEN, ONLY_START)  # attend to the first token if nothing else fits


def shift(by: int) -> tuple[slice, Tensor, slice, Tensor]:
    """Attend to the token `by` positions before."""
    return POSITION, torch.eye(8), POSITION, torch.eye(8).roll(by, 0)


def at(position: int) -> tuple[slice, Tensor, slice, Tensor]:
    """Let the last query attend to one position."""
    return POSITION, torch.eye(8)[LAST:], POSITION, torch.eye(8)[position : position + 1]


def not_itself(position: int) -> tuple[slice, Tensor, slice, Tensor]:
    """Let the query of one position not attend to itself."""
    own = torch.eye(8)[position : position + 1]
    return POSITION, -2 * own, POSITION, own


def match(query: slice, key: slice, matrix: Tensor = COPY) -> tuple[slice, Tensor, slice, Tensor]:
    """Attend to keys whose token is the matrix's image of the query's."""
    return query, matrix, key, torch.eye(8)


def shifted(seed: int, by: int, layers: int) -> Circuit:
    """Predict the token some positions before."""
    made, layer = Builder(layers, seed), layers - 1
    made.head(layer, 1, [shift(by)], (TOKEN, COPY, OUT))
    made.join((EMBEDDING, reads(layer, 1, "v")), (out(layer, 1), LOGITS))
    clean = made.tokens()
    return made.done(clean, made.tokens(), clean[:, LAST - by])


def chain(seed: int, hops: int) -> Circuit:
    """Predict a token by several previous-token heads, each reading the one before."""
    made = Builder(hops, seed)
    spaces = (TOKEN, A, B)[:hops]
    for layer, (source, to) in enumerate(zip(spaces, (*spaces[1:], OUT), strict=True)):
        made.head(layer, layer, [shift(1)], (source, COPY, to))
        before = EMBEDDING if layer == 0 else out(layer - 1, layer - 1)
        made.join((before, reads(layer, layer, "v")))
    made.join((out(hops - 1, hops - 1), LOGITS))
    clean = made.tokens()
    return made.done(clean, made.tokens(), clean[:, LAST - hops])


def induction(seed: int) -> Circuit:
    """Predict the token after the earlier occurrence of the last token: keys of a previous head."""
    made = Builder(2, seed)
    made.head(0, 2, [shift(1)], (TOKEN, COPY, A))
    made.head(1, 0, [match(TOKEN, A), REST], (TOKEN, COPY, OUT))
    made.join((EMBEDDING, reads(0, 2, "v")), (out(0, 2), reads(1, 0, "k")))
    made.join(*((EMBEDDING, reads(1, 0, letter)) for letter in "qv"), (out(1, 0), LOGITS))

    def inputs() -> Tensor:
        tokens = made.tokens()
        tokens[:, LAST] = tokens[:, 3]
        return tokens

    clean = inputs()
    return made.done(clean, inputs(), clean[:, 4])


def query_composition(seed: int) -> Circuit:
    """Look for a function of the previous token, which a first head copied into the query."""
    made = Builder(2, seed)
    looked, given = made.permutation(), made.permutation()
    made.head(0, 0, [shift(1)], (TOKEN, COPY, A))
    made.head(1, 1, [match(A, TOKEN, looked), REST], (TOKEN, given, OUT))
    made.join((EMBEDDING, reads(0, 0, "v")), (out(0, 0), reads(1, 1, "q")))
    made.join(*((EMBEDDING, reads(1, 1, letter)) for letter in "kv"), (out(1, 1), LOGITS))
    clean = made.tokens()
    answers = given @ looked @ torch.eye(8)[clean[:, LAST - 1]].T
    return made.done(clean, made.tokens(), answers.argmax(0))


def skip_trigram(seed: int) -> Circuit:
    """`A … B` predicts C: the last token chooses which token to attend to."""
    made = Builder(2, seed)
    looked, given = made.permutation(), made.permutation()
    made.head(1, 2, [match(TOKEN, TOKEN, looked), REST], (TOKEN, given, OUT))
    made.join(*((EMBEDDING, reads(1, 2, letter)) for letter in "qkv"), (out(1, 2), LOGITS))
    clean = made.tokens()
    answers = given @ looked @ torch.eye(8)[clean[:, LAST]].T
    return made.done(clean, made.tokens(), answers.argmax(0))


def duplicate(seed: int) -> Circuit:
    """Detect that the last token occurred before; 1 is the answer."""
    made = Builder(2, seed)
    found = torch.zeros(8, 8)
    found[1, 1:] = 1
    made.head(0, 1, [SAME, not_itself(LAST), REST], (TOKEN, found, OUT))
    made.join(*((EMBEDDING, reads(0, 1, letter)) for letter in "qk"), (out(0, 1), LOGITS))
    corrupt = made.tokens()  # its last token does not occur in `clean` either
    clean = corrupt.clone()
    clean[:, LAST], corrupt[:, 4] = clean[:, 4], clean[:, 3]
    return made.done(clean, corrupt, torch.ones(len(clean), dtype=torch.long))


def present(seed: int, both: bool) -> Circuit:
    """AND, or OR: a neuron reads two heads that look for the tokens 2 and 5; 1 is the answer."""
    made = Builder(1, seed)
    for head, token in ((0, 2), (2, 5)):
        row = torch.eye(8)[token : token + 1]
        found = torch.zeros(8, 8)
        found[head, token] = 1
        made.head(0, head, [(POSITION, ONES, TOKEN, row), REST], (TOKEN, found, A))
        made.join(*((EMBEDDING, reads(0, head, letter)) for letter in "kv"))
        made.join((out(0, head), fed(0)))
    inputs, one = torch.zeros(2, 40), torch.eye(8)[1:2]
    inputs[:, A.start], inputs[:, A.start + 2] = 1, 1
    # AND: relu(a + b - 1). OR: relu(a + b) - relu(a + b - 1).
    weights = torch.cat((one * (not both), one * (1 if both else -1)))
    made.neurons(0, inputs, torch.tensor([0.0, -1.0]), 3 * weights)
    made.join((feeds(0), LOGITS))
    tokens = torch.randint(0, 5, (32, 7), generator=made.random)
    others = torch.cat((torch.zeros(32, 1), torch.tensor([1, 3, 4, 6, 7])[tokens]), 1).long()
    clean = others.clone()
    clean[16 * (not both) :, 2] = 2
    clean[: 32 if both else 16, 5] = 5
    return made.done(clean, others, torch.ones(32, dtype=torch.long))


def modular_sum(seed: int) -> Circuit:
    """Add two tokens modulo 5: two heads read the numbers, and one neuron each knows a sum."""
    made = Builder(1, seed)
    for head, (position, to) in enumerate(((2, A), (5, B))):
        made.head(0, head, [at(position)], (TOKEN, COPY, to))
        made.join((EMBEDDING, reads(0, head, "v")), (out(0, head), fed(0)))
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    inputs, outputs = torch.zeros(25, 40), torch.eye(8)[pairs.sum(-1) % 5 + 1]
    inputs[torch.arange(25), A.start + 1 + pairs[:, 0]] = 1
    inputs[torch.arange(25), B.start + 1 + pairs[:, 1]] = 1
    made.neurons(0, inputs, -torch.ones(25), 3 * outputs)
    made.join((feeds(0), LOGITS))
    numbers = torch.randint(0, 5, (64, LENGTH), generator=made.random) + 1
    clean, corrupt = numbers.split(32)
    return made.done(clean, corrupt, (clean[:, 2] + clean[:, 5] - 2) % 5 + 1)


def lookup(seed: int) -> Circuit:
    """Two tables in two feed-forwards, one after the other."""
    made = Builder(2, seed)
    first, second = made.permutation(), made.permutation()
    inputs = torch.zeros(8, 40)
    inputs[:, TOKEN] = torch.eye(8)
    made.neurons(0, inputs, torch.zeros(8), first.T, A)
    made.neurons(1, inputs.roll(16, 1), torch.zeros(8), second.T)
    made.join((EMBEDDING, fed(0)), (feeds(0), fed(1)), (feeds(1), LOGITS))
    clean = made.tokens()
    answers = second @ first @ torch.eye(8)[clean[:, LAST]].T
    return made.done(clean, made.tokens(), answers.argmax(0))


def resting(seed: int) -> Circuit:
    """Predict the third token if the last one is 7; otherwise the head rests on the first token."""
    made = Builder(2, seed)
    scores = [(TOKEN, torch.eye(8)[7:], POSITION, torch.eye(8)[3:4]), REST]
    made.head(1, 0, scores, (TOKEN, COPY, OUT))
    made.join(*((EMBEDDING, reads(1, 0, letter)) for letter in "qv"), (out(1, 0), LOGITS))
    clean, corrupt = (tokens.where(tokens < 7, 1) for tokens in (made.tokens(), made.tokens()))
    clean[:, LAST] = 7
    return made.done(clean, corrupt, clean[:, 3])


def indirect_object(seed: int) -> Circuit:
    """Predict the name that occurs once (2211.00593): duplicate, inhibition and mover heads."""
    made = Builder(3, seed)
    # At 5: the name that was there before.
    made.head(0, 0, [SAME, not_itself(5), REST], (TOKEN, COPY, A))
    made.head(1, 1, [at(5)], (A, COPY, B))
    names = torch.eye(8)[1:3].sum(0, keepdim=True)  # they are at 1 and 2
    avoid = (B, -COPY[1:], TOKEN, torch.eye(8)[1:])
    made.head(
        2, 2, [avoid, (POSITION, 2 * torch.eye(8)[LAST:], POSITION, names)], (TOKEN, COPY, OUT)
    )
    made.join(*((EMBEDDING, reads(0, 0, letter)) for letter in "qkv"))
    made.join((out(0, 0), reads(1, 1, "v")), (out(1, 1), reads(2, 2, "q")))
    made.join(*((EMBEDDING, reads(2, 2, letter)) for letter in "kv"), (out(2, 2), LOGITS))

    def inputs(repeated: int) -> Tensor:
        tokens = made.tokens()
        tokens[:16, 5], tokens[16:, 5] = tokens[:16, repeated], tokens[16:, 3 - repeated]
        return tokens

    clean = inputs(1)
    answers = torch.cat((clean[:16, 2], clean[16:, 1]))
    return made.done(clean, inputs(2), answers)


CIRCUITS: dict[str, Callable[[int], Circuit]] = {
    "previous token": lambda seed: shifted(seed, by=1, layers=1),
    "shift by 3": lambda seed: shifted(seed, by=3, layers=2),
    "two hops by values": lambda seed: chain(seed, hops=2),
    "three hops by values": lambda seed: chain(seed, hops=3),
    "induction (by keys)": induction,
    "two hops by queries": query_composition,
    "skip-trigram": skip_trigram,
    "duplicate token": duplicate,
    "AND of two heads": lambda seed: present(seed, both=True),
    "OR of two heads": lambda seed: present(seed, both=False),
    "sum modulo 5": modular_sum,
    "two tables": lookup,
    "resting on the first token": resting,
    "indirect object": indirect_object,
}
