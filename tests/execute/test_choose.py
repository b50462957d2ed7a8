"""The line that announces the execution of a model is correct."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.execute.passes import last_logits
from tests.native.machine import OPERATORS, needs
from tests.nn.grid import CAUSAL, COVERING, make, name, random_tokens
from tests.nn.paged import paged
from workhorse.config.base import read_yaml
from workhorse.errors import WorkhorseError
from workhorse.execute.choose import NOT_COUNTED, decoding_backend, training_announcement
from workhorse.execute.native_decoding.layers import DecodingSdpa, StreamedLinear
from workhorse.execute.native_decoding.native_step import NativeStepBackend
from workhorse.native import Operators
from workhorse.native.steps import Steps
from workhorse.nn import DecoderConfig
from workhorse.train import Recipe, TrainConfig
from workhorse.train.step.build import build_step, training_operators

# PyTorch's compiler imports modules that PyTorch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
CPU = torch.device("cpu")
LINE = re.compile(
    r"decode: (?:reference(?:; .+)?|native \((?:[A-Z0-9-]+|plain)\), "
    r"(?:whole steps|(\d+) of (\d+) modules(?:; by PyTorch: ([\w, ]+))?(?:; no whole steps: .+)?))"
)
EACH = pytest.mark.parametrize(
    "config", CAUSAL, ids=[name(COVERING.index(config)) for config in CAUSAL]
)


@needs("steps")
@EACH
@torch.no_grad()
def test_the_line_is_what_runs(config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps are calls of the operator; otherwise the line names modules without one."""
    backend = decoding_backend(make(config).eval(), wait=True)
    line = backend.announcement
    calls: list[object] = []
    run = Steps.run
    monkeypatch.setattr(Steps, "run", lambda *a, **k: calls.append(a) or run(*a, **k))
    view = paged(backend.decoder, 2, 8)
    prompt, token = random_tokens(config, 2, 8).split([7, 1], dim=1)
    last_logits(backend, prompt, view)
    executed: set[object] = set()
    sys.setprofile(lambda frame, *_: executed.add(frame.f_code))
    try:
        last_logits(backend, token, view)
    finally:
        sys.setprofile(None)
    found = LINE.fullmatch(line)
    assert found, line
    whole = line.endswith("whole steps")
    assert whole is bool(calls)
    if whole:
        return
    native, total, plain = int(found[1]), int(found[2]), found[3]
    assert 0 < native <= total
    assert (native < total) is bool(plain)
    named = set((plain or "").split(", ")) - {""}
    leaves = [module for module in backend.decoder.modules() if not list(module.children())]
    assert named <= {type(module).__name__ for module in leaves}
    ran = {type(one) for one in leaves if type(one).forward.__code__ in executed}
    by_pytorch = {kind for kind in ran if kind.__module__.startswith(("workhorse.nn", "torch"))}
    assert {kind.__name__ for kind in by_pytorch - {*NOT_COUNTED}} <= named


@needs("steps")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_of_the_demo_has_whole_steps(dtype: torch.dtype) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "stdlib-small.yaml"
    config = Recipe.from_dict(read_yaml(recipe)).decoder_config(vocab_size=96)
    reference = config.build(dtype=dtype).eval()
    backend = decoding_backend(reference, wait=True, exact=True)
    assert backend.announcement.endswith("whole steps")
    assert backend.is_invariant


@needs("decoding")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_decoder_on_the_cpu_gets_the_operators_of_one(device: str) -> None:
    with torch.device(device):
        reference = CAUSAL[0].build(kernel="sdpa").eval()
    backend = decoding_backend(reference, wait=True)
    kinds = StreamedLinear | DecodingSdpa
    ours = [part for part in backend.decoder.modules() if isinstance(part, kinds)]
    assert bool(ours) is (device == "cpu")
    steps = OPERATORS.steps is not None and device == "cpu"
    assert isinstance(backend, NativeStepBackend) is steps
    if device == "meta":
        assert backend.decoder is reference
        assert backend.announcement == "decode: reference; no native steps"


def test_without_operators_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKHORSE_NATIVE", "0")
    reference = make(CAUSAL[0]).eval()
    backend = decoding_backend(reference)
    assert backend.decoder is reference
    assert backend.announcement == "decode: reference; WORKHORSE_NATIVE=0"
    with pytest.raises(WorkhorseError, match=r"execution=native needs native .*; choose auto"):
        decoding_backend(reference, "native")
    with pytest.raises(
        WorkhorseError, match=r"train.execution=native needs .*; set train.execution=auto"
    ):
        training_operators(CPU, torch.float32, "native")


@pytest.mark.parametrize("execution", ["auto", "reference", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_announces_what_it_computes_by(
    execution: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workhorse.execute.choose.cpu_has", lambda known: known != "amx_bf16")
    config = TrainConfig(steps=1, batch_size=2, seq_len=8, execution=execution, dtype=dtype)
    step = build_step(make(CAUSAL[0]), config, CPU)
    operators = training_operators(CPU, getattr(torch, dtype), config.execution)
    line = training_announcement(step.objective, operators, compiled=execution == "compiled")
    kinds = {type(module).__module__ for module in step.objective.modules()}
    native = any(kind.startswith("workhorse.execute.native") for kind in kinds)
    assert line.startswith("train: native (") is native
    assert native is (execution != "reference" and OPERATORS.training is not None)
    assert line.endswith("layers compiled by PyTorch") is (execution == "compiled")
    assert ("BF16" in line) is (native and dtype == "bfloat16")


def test_a_reference_step_uses_no_operator() -> None:
    config = TrainConfig(steps=1, batch_size=2, seq_len=8, execution="reference")
    step = build_step(make(CAUSAL[0]), config, CPU)
    assert training_operators(CPU, torch.float32, "reference") == Operators()
    assert all(
        not type(part).__module__.startswith("workhorse.execute")
        for part in step.objective.modules()
    )
    assert step.optimizer.masters.operators is None
