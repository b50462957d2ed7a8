"""Settings and fixtures of all tests: no network, a fixed random state, a small run directory.

The environment variable `WORKHORSE_TEST_SEED` (0 by default) changes what tests draw: the state of
PyTorch's generator, Hypothesis' examples, the seeds of generations without a seed, and the order of
the modules and of the tests of each. A test that passes with one seed must pass with all.
"""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import random
import secrets
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import yaml

from workhorse.checkpoints import RunDirectory, weights_of
from workhorse.native.operators import LOADERS, resolve
from workhorse.nn import DecoderConfig
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, train_tokenizer
from workhorse.train import speed

SEED = int(os.environ.get("WORKHORSE_TEST_SEED", "0"))


def pytest_configure(config: pytest.Config) -> None:
    """Compile the native operators before any test runs, unless they are already compiled.

    Otherwise they would be compiled in the background and become available during some test. Also
    restore Python's SIGINT handler: a shell starts background jobs with SIGINT ignored, and some
    tests interrupt themselves.

    Hypothesis draws the same examples in every run with the same seed, so that a failure can be
    reproduced. The default suite draws 30.
    """
    examples = 30 if "not slow" in config.option.markexpr else 100
    hypothesis.settings.register_profile(
        "workhorse", deadline=None, derandomize=not SEED, max_examples=examples, database=None
    )
    hypothesis.settings.load_profile("workhorse")
    if SEED:
        hypothesis.core.global_force_seed = SEED  # as the option --hypothesis-seed does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # By default, a third of the time of a small run is spent in the measurement of the peak.
    speed.PROBE_SECONDS, speed.PROBE_SIZES = 0.001, {"cpu": (256,)}
    # By default, a twentieth of the time is spent in garbage collection of imported modules.
    gc.set_threshold(10_000, 20, 20)
    if not hasattr(config, "workerinput"):
        resolve(*LOADERS, wait=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip campaigns that would be deselected: importing them takes seconds in each process."""
    deselected = "not campaign" in config.option.markexpr
    return True if deselected and collection_path == Path(__file__).parent / "campaigns" else None


@pytest.fixture(autouse=True)
def _fixed_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    # `torch.manual_seed` formats a stack trace in each call.
    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(SEED)
    monkeypatch.setattr(secrets, "randbits", random.Random(SEED).getrandbits)


@pytest.fixture(autouse=True)
def _handlers_of_signals() -> Iterator[None]:
    """Restore signal handlers after each test; code that starts processes may replace them."""
    signals = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(one) for one in signals]
    yield
    for one, handler in zip(signals, before, strict=True):
        signal.signal(one, handler)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run directory: a byte-level model of context 32; the folder `texts` has held-out data."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a", "b", "c"):
        (texts / f"{name}.txt").write_text(f"text {name} " * 9)
    special = SpecialTokensConfig(
        bos=None, eos="<|eos|>", pad=None, chat=("<|user|>", "<|assistant|>", "<|end|>")
    )
    tokenizer = train_tokenizer(BytesConfig(special=special), [])
    config = DecoderConfig.from_dict(
        {
            "vocab_size": tokenizer.vocab_size,
            "d_model": 16,
            "n_layers": 1,
            "max_seq_len": 32,
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": {"kind": "rms_norm"},
                    "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
                    "feed_forward": {"kind": "gated_mlp", "d_ff": 32},
                }
            },
            "final_norm": {"kind": "rms_norm"},
            "init": {"kind": "normal", "std": 0.5},
        }
    )
    torch.manual_seed(0)
    recipe = {
        "name": "tiny",
        "data": {"corpus": {"kind": "folder", "path": str(texts), "validation": str(texts)}},
    }
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.begin(yaml.safe_dump(recipe))
    run.save_tokenizer(tokenizer)
    run.save_config(config)
    run.store().save(1, weights_of(config.build()), {}, {"config": config.to_dict()})
    return run.path


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests marked `slow`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `slow` tests, run `early` tests first, and skip `cuda` tests without a CUDA device."""
    mark_slow(items)
    if SEED:
        items.sort(key=lambda item: (_draw(item.nodeid.partition("::")[0]), _draw(item.nodeid)))
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


def _draw(name: str) -> float:
    return random.Random(f"{SEED} {name}").random()


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark cases as slow that `grids.yaml` excludes from the default suite."""
    grids: dict[str, int | str] = yaml.safe_load(
        (Path(__file__).parent / "grids.yaml").read_text("utf-8")
    )
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        for name in {item.nodeid, item.nodeid.split("[")[0]}:
            cases[name].append(item)
    for name, count in grids.items():
        grid = cases[name]
        if isinstance(count, str):
            by_default = set(range(["even", "odd"].index(count), len(grid), 2))
        else:
            by_default = {index * len(grid) // count for index in range(count)}
        for index, item in enumerate(grid):
            if index not in by_default:
                item.add_marker("slow")
