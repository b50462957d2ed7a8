"""Rollouts, built by the functions that `workhorse train` uses."""

import torch

from benchmarks.contestants.ours import keep_memory
from benchmarks.harness.limits import seconds_of
from benchmarks.harness.models import huggingface_folder
from benchmarks.harness.shapes import TUNING
from benchmarks.harness.worker import Round

PROMPT, NEW = 64, 64
DEVICE = torch.device("cpu")


def complete(*, shape: str, dtype: str, rows: int, exact: bool, models: str, threads: int) -> Round:
    """Rounds of completions of `rows` prompts."""
    from workhorse.checkpoints.stored import open_stored
    from workhorse.execute.choose import decoding_backend
    from workhorse.train.rollouts import roll

    torch.set_num_threads(threads)
    stored = open_stored(str(huggingface_folder(shape, models)))
    reference = stored.load_decoder(dtype=getattr(torch, dtype))
    backend = decoding_backend(reference, wait=True, exact=exact, scores=exact)

    def take() -> None:
        roll(
            backend,
            _prompts(shape, rows),
            [1000 * row for row in range(rows)],
            tokenizer=_Silent(shape),  # type: ignore[arg-type]
            seq_len=PROMPT + NEW,
            max_new_tokens=NEW,
            stop_tokens=(),
        )

    take()
    return lambda: {"tokens": rows * NEW / seconds_of(take, "cpu")}


def generate(*, shape: str, dtype: str, rows: int, models: str, threads: int) -> Round:
    """Rounds of `workhorse.generate` for the same prompts."""
    from workhorse import generate as engine
    from workhorse.checkpoints.stored import open_stored
    from workhorse.execute.choose import decoding_backend

    torch.set_num_threads(threads)
    stored = open_stored(str(huggingface_folder(shape, models)))
    reference = stored.load_decoder(dtype=getattr(torch, dtype))
    backend = decoding_backend(reference, wait=True)
    config = engine.GenerationConfig(max_new_tokens=NEW, temperature=1.0, seed=0, logprobs=0)

    def take() -> None:
        engine.generate(backend, _prompts(shape, rows), config)

    take()
    return lambda: {"tokens": rows * NEW / seconds_of(take, "cpu")}


def step(*, shape: str, dtype: str, rows: int, exact: bool, models: str, threads: int) -> Round:
    """Rounds of one step on `rows` completions with their prompts."""
    from workhorse.checkpoints.stored import open_stored
    from workhorse.train.recipe.training import TrainConfig
    from workhorse.train.step.build import build_step

    torch.set_num_threads(threads)
    config = TrainConfig.from_dict(
        {
            "steps": 1_000_000,
            "seq_len": PROMPT + NEW,
            "batch_size": rows,
            "dtype": dtype,
            "objective": {"kind": "policy"},
            "rollouts": {"completions": 1, "baseline": "none", "exact": exact},
        }
    )
    keep_memory(DEVICE)
    stored = open_stored(str(huggingface_folder(shape, models)))
    decoder = stored.load_decoder(dtype=torch.float32)
    step = build_step(decoder.train(), config, DEVICE)
    batch = config.objective.synthetic(torch.tensor(_prompts(shape, rows, PROMPT + NEW)))

    def take() -> None:
        step.update(*step.backward(batch), schedule=1.0)

    take()
    return lambda: {"tokens": rows * (PROMPT + NEW) / seconds_of(take, "cpu")}


class _Silent:
    """A tokenizer whose tokens have no text and no end."""

    eos_id = None

    def __init__(self, shape: str) -> None:
        self.vocab_size = TUNING[shape].vocab_size

    def stream(self, **_: object) -> "_Silent":
        return self

    def push(self, _token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def decode(self, _tokens: object) -> str:
        return ""


def _prompts(shape: str, rows: int, length: int = PROMPT) -> list[list[int]]:
    torch.manual_seed(0)
    return torch.randint(TUNING[shape].vocab_size, (rows, length)).tolist()
