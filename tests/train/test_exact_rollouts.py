"""Exact rollouts: log-probabilities recorded when decoding have the bits of those in training."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.native.machine import OPERATORS
from tests.parity import reference
from tests.parity.all_cases import ALL
from tests.train.test_rollouts import recipe
from workhorse import load
from workhorse.data import Batch
from workhorse.errors import WorkhorseError
from workhorse.execute.choose import decoding_backend
from workhorse.generate.runner import Chunk, Runner
from workhorse.generate.sequence import TokenSequence
from workhorse.nn import DecoderConfig
from workhorse.run import train
from workhorse.train import Recipe, TrainConfig, read_metrics
from workhorse.train.objectives.objective import ModelObjective
from workhorse.train.step.build import build_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* has no tokenizer"),
    pytest.mark.skipif(
        None in (OPERATORS.steps, OPERATORS.training, OPERATORS.vectors),
        reason="exact rollouts need native operators of steps, training and gemms",
    ),
]

EXACT = [
    *("arcee", "bitnet", "bloom", "codegen", "cohere", "ernie4_5", "falcon", "gemma", "glm"),
    *("glm4", "gpt_neox", "gptj", "helium", "hunyuan_v1_dense", "internlm3", "iquestcoder"),
    *("jais2", "llama", "mpt", "nemotron", "olmo2", "opt", "persimmon", "phi", "qwen2", "qwen3"),
    *("smollm3", "stablelm"),
]
"""Model types whose first case is exact. Others have dropout, short windows, a multiplier or cap of
the logits, or a computation without a native step, such as experts."""
LLAMA: dict[str, Any] = {
    "d_model": 96,
    "n_layers": 2,
    "vocab_size": 211,
    "max_seq_len": 64,
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "rms_norm"},
            "attention": {"n_heads": 6, "n_kv_heads": 2, "position": {"kind": "rope"}},
            "feed_forward": {"kind": "gated_mlp", "d_ff": 1600, "activation": "silu"},
        }
    },
    "final_norm": {"kind": "rms_norm"},
}
GPT: dict[str, Any] = {
    **LLAMA,
    "embedding": {"position": {"kind": "learned"}},
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "layer_norm"},
            "attention": {"n_heads": 4, "qkv_bias": True, "out_bias": True},
            "feed_forward": {"kind": "mlp", "d_ff": 200, "activation": "gelu", "bias": True},
        }
    },
    "final_norm": {"kind": "layer_norm"},
    "head": {"tied": True},
}
MPT: dict[str, Any] = deepcopy(GPT | {"d_model": 108, "embedding": {}})
MPT["blocks"]["main"]["attention"] = {"n_heads": 6, "position": {"kind": "alibi", "scaled": True}}

LATENT = {
    "kind": "latent_attention",
    "n_heads": 2,
    "kv_rank": 16,
    "nope_dim": 16,
    "rope_dim": 16,
    "value_dim": 16,
}
DEMO: dict[str, Any] = deepcopy(LLAMA | {"head": {"tied": True}})
"""The parts of `recipes/stdlib-small.yaml`: short convolutions, and norms of each head."""
DEMO["blocks"]["main"] |= {
    "kind": "parallel",
    "norm": {"kind": "layer_norm"},
    "attention": {
        **{"n_heads": 6, "position": {"kind": "rope"}},
        "qk_norm": {"norm": {"kind": "layer_norm", "bias": False}, "over": "each_head"},
    },
    "convolution": {"width": 3},
}


WIRINGS: dict[str, dict[str, Any]] = {
    "pre": {},
    "normed residual": {"norm_residual": True},
    **{kind: {"kind": f"{kind}_norm"} for kind in ("post", "reordered", "sandwich")},
    "parallel": {"kind": "parallel"},
    "parallel, two norms": {"kind": "parallel", "norms": 2},
}


def wired(name: str) -> dict[str, Any]:
    """LLAMA with another wiring."""
    return LLAMA | {"blocks": {"main": LLAMA["blocks"]["main"] | WIRINGS[name]}}


class Pair:
    """A model's exact decoding backend, and its training body."""

    def __init__(self, config: DecoderConfig, dtype: str, seq_len: int) -> None:
        torch.manual_seed(0)
        decoder = config.build()
        with torch.no_grad():
            for weight in decoder.parameters():  # also biases and gains
                weight.add_(torch.randn_like(weight), alpha=0.05)
        train = TrainConfig.from_dict(
            {
                "steps": 1,
                "batch_size": 1,
                "seq_len": seq_len,
                "dtype": dtype,
                "objective": {"kind": "policy"},
                "rollouts": {"completions": 1, "baseline": "none", "exact": True},
            }
        )
        step = build_step(decoder, train, torch.device("cpu"))
        assert isinstance(step.objective, ModelObjective)
        self.objective = step.objective.eval()
        self.backend = decoding_backend(decoder, wait=True, exact=True, scores=True)

    @torch.no_grad()
    def decoded(self, tokens: Tensor, first: Sequence[int]) -> Tensor:
        """Log-probability of each token but the first, (rows, seq - 1), decoded token by token.

        Of each row, the first tokens are processed in one pass.
        """
        rows, seq = tokens.shape
        runner = Runner(self.backend, tokens=rows * (seq + 32), sequences=rows)
        sequences = [TokenSequence([], runner.cache) for _ in range(rows)]
        found = torch.zeros(rows, seq - 1)
        done = [0] * rows
        while min(done) < seq - 1:
            counts = [
                min(many if at == 0 else 1, seq - 1 - at)
                for many, at in zip(first, done, strict=True)
            ]
            chunks, ran = [], [row for row, count in enumerate(counts) if count]
            for row in ran:
                sequences[row].tokens.extend(
                    tokens[row, done[row] : done[row] + counts[row]].tolist()
                )
                chunks.append(Chunk(sequences[row], counts[row], counts[row]))
            logits = runner.run(chunks)
            for row, last in zip(ran, logits.last, strict=True):
                begin, end = done[row], done[row] + counts[row]
                own = logits.of[last + 1 - counts[row] : last + 1]
                scores = self.backend.scores(own, tokens[row, begin + 1 : end + 1])
                assert scores is not None
                found[row, begin:end] = scores
                done[row] = end
        return found

    @torch.no_grad()
    def trained(self, tokens: Tensor) -> Tensor:
        """The same log-probabilities in the training body."""
        sources = torch.zeros(len(tokens), dtype=torch.int64)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], None, sources)
        return self.objective.score(batch).target.float()


def differing(pair: Pair, rows: int, seq: int, vocab: int) -> int:
    """The number of log-probabilities that differ, for rows that begin with prompts."""
    tokens = torch.randint(vocab, (rows, seq))
    first = [1 + (7 * row) % (seq - 1) for row in range(rows)]
    return int((pair.decoded(tokens, first) != pair.trained(tokens)).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fields", [GPT, MPT, DEMO, *map(wired, WIRINGS)], ids=["gpt", "mpt", "demo", *WIRINGS]
)
def test_decoding_has_the_bits_of_training(fields: dict[str, Any], dtype: str) -> None:
    """Also with sums of more elements than a gemm adds up at once, and an odd length."""
    pair = Pair(DecoderConfig.from_dict(fields), dtype, 23)
    assert differing(pair, 5, 24, 211) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXACT)
def test_model_types(model_type: str, tmp_path: Path) -> None:
    reference.make(model_type, ALL[model_type][0], tmp_path)
    config = load(tmp_path, execution="reference").config
    for dtype in ("float32", "bfloat16"):
        assert differing(Pair(config, dtype, 23), 3, 24, config.vocab_size) == 0


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (("blocks", "main"), {"attention": LATENT}),
        (("blocks", "main", "attention"), {"dropout": 0.1}),
        (("embedding",), {"dropout": 0.1}),
    ],
    ids=["latent attention", "attention dropout", "embedding dropout"],
)
def test_a_model_that_cannot_is_refused(
    place: tuple[str, ...], change: dict[str, Any], tmp_path: Path
) -> None:
    """Also if all its completions are unfinished and would be ignored."""
    rollouts = {"completions": 4, "max_new_tokens": 12, "exact": True, "keep_unfinished": False}
    settings = recipe(rollouts=rollouts).to_dict()
    part = settings["model"]
    for key in place:
        part = part.setdefault(key, {})
    part |= change
    with pytest.raises(WorkhorseError, match="exact is not possible for this model"):
        train(Recipe.from_dict(settings), tmp_path / "run")


def test_an_execution_that_is_not_native_is_refused(tmp_path: Path) -> None:
    exact = {"completions": 4, "max_new_tokens": 5, "exact": True}
    train(recipe(rollouts=exact, execution="native", steps=1, eval_every=None), tmp_path / "native")
    for execution in ("reference", "compiled"):
        with pytest.raises(WorkhorseError, match=f"exact needs .* not train.execution={execution}"):
            train(recipe(rollouts=exact, execution=execution), tmp_path / execution)


def test_a_run_of_exact_rollouts_begins_with_ratios_of_1(tmp_path: Path) -> None:
    exact = {"completions": 4, "max_new_tokens": 5, "exact": True}
    train(recipe(rollouts=exact, dtype="bfloat16"), tmp_path / "run")
    steps = [
        event
        for event in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if event["kind"] == "step"
    ]
    assert [(event["kl_old"], event["ratio_outside"]) for event in steps] == [(0.0, 0.0)] * 4


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_200_000_tokens_in_batches_of_1_to_32(dtype: str, threads: None) -> None:
    pair = Pair(DecoderConfig.from_dict(LLAMA), dtype, 63)
    compared = 0
    while compared < 200_000:
        for rows in range(1, 33):
            assert differing(pair, rows, 64, 211) == 0
            compared += rows * 63
