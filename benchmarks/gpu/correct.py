"""Correctness on the device: compared with transformers, between kernels, and after a resume.

Needs the packages of the tests: transformers, hypothesis and pytest.
"""

import hashlib
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants.ours import gpt
from benchmarks.gpu.block import Check, Figures, Setting
from benchmarks.harness.shapes import TRAINING
from workhorse.models.huggingface import MODEL_TYPES
from workhorse.nn import Decoder
from workhorse.run import train
from workhorse.train import Event, Recipe

FLOAT32, BFLOAT16 = 1e-5, 1.2
"""Bounds of the tests. The first is the largest difference relative to the logits' scale; the
second is our error relative to transformers' own error."""
TINY_TYPES = ("llama", "gpt2", "deepseek_v3")
PADDING = 4
"""Rows of a ragged batch are padded by 0 to `PADDING` - 1 tokens."""
STEPS, STOP = 20, 10
PARTS = 8
"""Parts of the grid; each can be requested separately, and so compiled beside the others."""
WIDER = 4
"""Head width relative to the tests: flex needs 16 elements on a GPU."""
COMPILING = 60.0
"""Time limit in seconds; no further model is compiled after it to compare kernels."""
SUITE = 240.0
"""Time limit in seconds for the CUDA tests."""

Forward = Callable[[Tensor], Tensor]
Outcome = tuple[Tensor, list[Tensor]]
"""Logits, and the experts chosen in each layer."""


def checks(setting: Setting) -> Iterator[Check]:
    """Checks that take seconds first, and checks that compile last."""
    for dtype in ("float32", "bfloat16"):
        yield Check(f"resumed in {dtype}", partial(_resumed, dtype, setting.device))
    yield Check("tests of cuda", _tests_of_cuda)
    for model_type in TINY_TYPES if setting.tiny else MODEL_TYPES:
        yield Check(f"beside transformers: {model_type}", partial(_family, model_type, setting))
    kernels = ["eager", "sdpa", "flex" if setting.device.type == "cuda" else "flex-uncompiled"]
    logits = cache(partial(_logits, device=setting.device))
    for part, pair in itertools.product(range(PARTS), itertools.combinations(kernels, 2)):
        name = f"kernels: {' and '.join(pair)}, {part + 1} of {PARTS}"
        yield Check(name, partial(_agree, pair, part, logits, setting))


def _resumed(dtype: str, device: torch.device) -> Figures:
    """A run that is stopped and resumed, compared with two uninterrupted runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text("".join(f"{number} and {number * 7}; " for number in range(4000)))
        recipe = _recipe(text, dtype, device)
        for run in ("whole", "again"):
            train(recipe, folder / run)
        stopped = train(recipe, folder / "parts", on_event=_stop)
        train(recipe, folder / "parts", resume=True)
        whole, again, parts = (_sums(folder / run) for run in ("whole", "again", "parts"))
    return {
        "steps": STEPS,
        "stopped_at": stopped.step,
        "sums": whole,
        "value": [file for file in whole if parts[file] != whole[file]],
        "goal": [],
        "reached": parts == whole,
        "repeats_without_a_stop": again == whole,
    }


def _recipe(text: Path, dtype: str, device: torch.device) -> Recipe:
    model = gpt(TRAINING["tiny"]).replace(vocab_size=512).to_dict()
    model["blocks"]["main"]["attention"]["dropout"] = 0.1  # tests the device's random state too
    return Recipe.from_dict(
        {
            "name": "resumed",
            "model": model,
            "tokenizer": {"kind": "bytes"},
            "data": {"corpus": {"kind": "text", "path": str(text)}},
            "train": {
                **{"steps": STEPS, "batch_size": 4, "seq_len": 64, "log_every": 1},
                **{"dtype": dtype, "device": str(device)},
            },
        }
    )


def _stop(event: Event) -> None:
    if event["kind"] == "step" and event["step"] == STOP:
        signal.raise_signal(signal.SIGINT)


def _sums(run: Path) -> dict[str, str]:
    """SHA-256 of the last checkpoint's tensor files, by file name."""
    files = sorted((run / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _tests_of_cuda() -> Figures:
    """The suite's tests with the marker `cuda`, in a separate process."""
    files = [str(file) for file in Path("tests").rglob("test_*.py") if _is_marked(file)]
    if not files:
        return {"files": 0, "says": "no test is marked cuda"}
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--tb=line", *sorted(files)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SUITE)
    return {
        "files": len(files),
        "value": done.returncode,
        "goal": 0,
        "reached": done.returncode == 0,
        "says": (done.stdout + done.stderr)[-2000:],
    }


def _is_marked(file: Path) -> bool:
    return "mark.cuda" in file.read_text(encoding="utf-8")


def _family(model_type: str, setting: Setting) -> Figures:
    """All shapes of a model type in float32; the first one also in bfloat16."""
    from tests.parity.all_cases import ALL

    found: dict[str, list[float]] = {"whole": [], "chunks": [], "ragged": []}
    for options in ALL[model_type]:
        for name, figure in _in_float32(model_type, options, setting.device).items():
            found[name].append(figure)
    largest = {name: _largest(figures) for name, figures in found.items() if figures}
    ratios, kept = _in_bfloat16(model_type, ALL[model_type][0], setting.device)
    worst = {"float32": _largest(largest.values()), "bfloat16": _largest(ratios.values())}
    return {
        "shapes": len(ALL[model_type]),
        "float32": largest,
        "bfloat16": ratios,
        "share_without_near_ties": kept,
        "value": worst,
        "goal": {"float32": FLOAT32, "bfloat16": BFLOAT16},
        "reached": worst["float32"] <= FLOAT32 and worst["bfloat16"] <= BFLOAT16,
    }


def _in_float32(model_type: str, options: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Largest differences from transformers' logits; without chunks if these cannot be equal."""
    from tests.parity import reference

    class OnDevice(reference.Pair):
        @property
        def tokens(self) -> Tensor:
            with torch.device("cpu"):  # the random generator is on the CPU
                return super().tokens.to(device)

    with tempfile.TemporaryDirectory() as folder:
        made = reference.make(model_type, options, Path(folder))
        pair = OnDevice(made.folder, made.theirs.to(device), made.ours.to(device))
        with reference.quiet(), torch.device(device):
            found = {"whole": reference.full(pair), "ragged": reference.ragged(pair)}
            if not reference.depends_on_length(pair):
                found["chunks"] = reference.cached(pair)
    return found


@torch.no_grad()
def _in_bfloat16(
    model_type: str, options: dict[str, Any], device: torch.device
) -> tuple[dict[str, float], float]:
    """Our bfloat16 errors against our float32, divided by transformers' errors.

    Returns:
        The ratios, and the share of tokens whose experts rounding did not change.
    """
    import transformers as hf

    from tests.parity import reference, rounding
    from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, reference.VOCAB, (rounding.ROWS, rounding.SEQ), generator=generator)
    tokens = tokens.to(device)
    theirs: list[Outcome] = []
    ours: list[Outcome] = []
    with reference.quiet(), tempfile.TemporaryDirectory() as folder:
        config = reference.their_config(model_type, options)
        made = reference.randomised(hf.AutoModelForCausalLM.from_config(config))
        _round(made, reference.float_buffers(made)).save_pretrained(folder)
        for dtype in (torch.float32, torch.bfloat16):
            model: Any = hf.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, experts_implementation="eager"
            )
            theirs.append(_watched(_logits_of(model.to(device).eval()), tokens))
            decoder = HuggingFaceDirectory(Path(folder)).load_decoder(dtype=dtype).to(device)
            ours.append(_watched(decoder, tokens))
    exact, low = ours
    plain = rounding._errors((exact, low), theirs)
    ratios = {"whole": plain.ratio}
    if not reference.depends_on_length(reference.Pair(Path(), made, decoder)):
        chunks = _on_cpu(rounding._decoded(decoder, tokens))
        ratios["chunks"] = rounding._errors((exact, chunks), theirs).ratio
        ragged = _ragged(decoder, tokens)
        cut = [_begin(one, ragged[0].shape[1]) for one in (exact, *theirs)]
        ratios["ragged"] = rounding._errors((cut[0], ragged), cut[1:]).ratio
    return ratios, plain.kept / plain.tokens


def _round(model: nn.Module, buffers: Iterator[tuple[str, Tensor]]) -> Any:
    """Round all weights to bfloat16, so that only computation causes errors."""
    for _, tensor in (*model.named_parameters(), *buffers):
        tensor.copy_(tensor.bfloat16())
    return model


def _logits_of(model: Any) -> Forward:
    return lambda tokens: model(tokens, use_cache=False).logits


def _watched(forward: Forward, tokens: Tensor) -> Outcome:
    from tests.parity.rounding import Choices

    with Choices(*tokens.shape) as choices:
        logits = forward(tokens)
    return _on_cpu((logits, choices.seen))


def _on_cpu(outcome: Outcome) -> Outcome:
    return outcome[0].cpu(), [chosen.cpu() for chosen in outcome[1]]


def _begin(outcome: Outcome, seq: int) -> Outcome:
    return outcome[0][:, :seq], [chosen[:, :seq] for chosen in outcome[1]]


def _ragged(decoder: Decoder, tokens: Tensor) -> Outcome:
    """Rows padded on the left by 0, 1, 2, … tokens; the outcomes of the same tokens of each row."""
    rows, seq = tokens.shape
    columns = torch.arange(seq, device=tokens.device)[None]
    padding = torch.arange(rows, device=tokens.device)[:, None] % PADDING
    positions = (columns - padding).clamp(min=-1)
    padded = tokens.gather(1, (columns - padding) % seq)
    logits, chosen = _watched(partial(decoder, positions=positions), padded)
    back = (columns[:, : seq - PADDING + 1] + padding).cpu()[..., None]  # (rows, seq, 1)

    def aligned(x: Tensor) -> Tensor:
        return x.gather(1, back.expand(-1, -1, x.shape[-1]))

    return aligned(logits), [aligned(one) for one in chosen]


@torch.no_grad()
def _logits(number: int, kernel: str, device: torch.device) -> dict[str, Tensor]:
    """Logits of a decoder of the grid for plain, packed and padded rows (only one if compiled)."""
    from tests.nn.attention.test_kernels import INPUTS, SEQ
    from tests.nn.grid import CHOICES, assemble, make, random_tokens

    config = assemble(CHOICES[number], wider=WIDER)
    torch.compiler.reset()
    decoder = make(config, kernel).to(device)
    tokens = random_tokens(config, 2, SEQ).to(device)
    with torch.device(device):
        given = {inputs.__name__: inputs() for inputs in INPUTS}
    if kernel == "flex":
        given = dict([list(given.items())[number % len(given)]])
    return {name: decoder(tokens, **extra) for name, extra in given.items()}


def _agree(
    pair: tuple[str, str],
    part: int,
    logits: Callable[[int, str], dict[str, Tensor]],
    setting: Setting,
) -> Figures:
    """Compare two kernels on those decoders of a part of the grid that both can compute."""
    from tests.nn.attention.test_kernels import TOLERANCE
    from tests.nn.grid import COVERING, error, name, refused

    begun = time.perf_counter()
    differences: dict[str, float] = {}
    failures: dict[str, str] = {}
    left_out = 0
    for number in range(part, 3 if setting.tiny else len(COVERING), PARTS):
        if any(refused(COVERING[number], kernel) for kernel in pair):
            continue
        if time.perf_counter() - begun > COMPILING:
            left_out += 1
            continue
        try:
            one, other = (logits(number, kernel) for kernel in pair)
            both = one.keys() & other.keys()
            differences[name(number)] = _largest(error(other[key], one[key]) for key in both)
        except Exception as wrong:
            failures[name(number)] = f"{type(wrong).__name__}: {wrong}"[:200]
    above = {key: figure for key, figure in differences.items() if not figure <= TOLERANCE}
    return {
        "models": len(differences),
        "left_out": left_out,
        "value": _largest(differences.values()) if differences else None,
        "goal": TOLERANCE,
        "reached": not above and not failures and bool(differences or not left_out),
        "above": above,
        "failures": failures,
    }


def _largest(figures: Iterable[float]) -> float:
    """The largest figure; NaN if one is NaN, which Python's `max` could skip."""
    return float(torch.tensor(list(figures), dtype=torch.float64).max())
