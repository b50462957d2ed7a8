"""Captured steps return the same logits as plain steps, after every kind of change since capture.

A recorder of CPU operators replaces the CUDA graph. It also runs the recorded operators again on
the same memory, with the same values.
"""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.execute.passes import last_logits
from tests.execute.windowed import LOCAL_AND_GLOBAL, logits_along, make, texts
from tests.nn.paged import paged
from tests.without_host import WithoutHost
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import ModuleBackend
from workhorse.execute.compiled.compiled_step import CompiledStep
from workhorse.execute.compiled.fixed_step import CapturedStep, FixedStepBackend, Replay
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.adapters import (
    adapter_parameters,
    add_adapter,
    disabled,
    set_adapter,
)
from workhorse.transforms.lora import LoraConfig


class Operators(WithoutHost):
    """Records every operator that runs; one that needs the host cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def run(self) -> None:
        """Run all operators again; write each result into the tensor of the first run."""
        for func, args, kwargs, before in self.calls:
            now = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)


class Recorder:
    """Counts its recordings, and replays them."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, function: Callable[[], Tensor]) -> Replay:
        self.recorded += 1
        with Operators() as operators:
            result = function()

        def replay() -> None:
            self.replayed += 1
            operators.run()

        return replay, result


def captured(seed: int = 0) -> tuple[FixedStepBackend, Recorder]:
    recorder = Recorder()
    return capturing(make(seed), recorder), recorder


def capturing(decoder: Decoder, recorder: Any = None) -> FixedStepBackend:
    step = CapturedStep(decoder, recorder=recorder)
    return FixedStepBackend(ModuleBackend(decoder), step, "captured")


def test_the_stand_in_replays_what_its_memory_holds() -> None:
    x, count = torch.ones(3), torch.zeros(1)

    def function() -> Tensor:
        count.add_(1)
        return (x[1:] * 2 + count).sum(0, keepdim=True)

    replay, result = Recorder()(function)
    assert result.item() == 6
    x.copy_(torch.tensor([9.0, 5, 7]))
    replay()
    assert (result.item(), count.item()) == (28, 2)
    with pytest.raises(RuntimeError, match="needs the host"):
        Recorder()(lambda: x * x.sum().item())


def test_one_recording_serves_texts_until_their_tables_are_twice_as_wide() -> None:
    plain, (backend, recorder) = make(), captured()
    tokens = torch.randint(0, 61, (1, 100))  # 4 blocks; the recording reads 16
    pairs = zip(logits_along(plain, tokens), logits_along(backend, tokens), strict=True)
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (recorder.recorded, recorder.replayed) == (1, 97)
    long = torch.randint(0, 61, (1, 520))
    with torch.no_grad():
        caches = [paged(one, 1, 521) for one in (plain, backend.decoder)]
        for one, cache in zip((plain, backend), caches, strict=True):
            last_logits(one, long[:, :510], cache)
        for step in range(510, 520):
            expected, found = (
                last_logits(one, long[:, step : step + 1], cache)
                for one, cache in zip((plain, backend), caches, strict=True)
            )
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert recorder.recorded == 3  # another cache; then a wider table


def test_greedy_texts_of_several_rows_and_guesses_are_the_same() -> None:
    backend, recorder = captured()
    assert texts(backend, 3, 40) == texts(make(), 3, 40)
    assert texts(backend, 1, 60, guesses=5) == texts(make(), 1, 60)
    assert recorder.replayed > recorder.recorded


def test_another_weight_is_seen_and_a_replaced_one_recorded_again() -> None:
    backend, recorder = captured()
    texts(backend, 1, 4)
    before = recorder.recorded
    with torch.no_grad():
        backend.decoder.layers[0].attention.out_proj.weight.mul_(-1)
    changed = make()
    with torch.no_grad():
        changed.layers[0].attention.out_proj.weight.mul_(-1)
    assert texts(backend, 1, 12) == texts(changed, 1, 12)
    backend.decoder.load_state_dict(make(1).state_dict(), assign=True)
    assert texts(backend, 1, 12) == texts(make(1), 1, 12)
    assert recorder.recorded > before


def test_a_copy_records_its_own_steps() -> None:
    backend, recorder = captured()
    expected = texts(backend, 1, 8)
    made = copy.deepcopy(backend)
    with torch.no_grad():
        for weight in backend.decoder.parameters():
            weight.zero_()
    assert texts(made, 1, 8) == expected
    assert isinstance(made.step, CapturedStep)
    assert made.step.recorder is not recorder


def test_captured_and_compiled_steps_can_be_pickled() -> None:
    decoder = make()
    step = CapturedStep(decoder, CompiledStep(decoder))
    backend = FixedStepBackend(ModuleBackend(decoder), step, "compiled (CUDA graphs)")
    copied = pickle.loads(pickle.dumps(backend))
    assert type(copied.step.step) is CompiledStep
    assert copied.step.decoder is copied.decoder is copied.fallback.decoder


def test_another_adapter_is_recorded() -> None:
    decoder = add_adapter(make(), LoraConfig(), name="one")
    decoder = add_adapter(decoder, LoraConfig(), name="two")
    with torch.no_grad():
        for name in ("one", "two"):
            for weight in adapter_parameters(decoder, name).values():
                weight.normal_(0, 0.3)
    backend, plain = capturing(decoder, Recorder()), copy.deepcopy(decoder)
    found = []
    for name in ("one", "two", "one"):
        set_adapter(decoder, name)
        set_adapter(plain, name)
        found.append(texts(backend, 1, 12))
        assert found[-1] == texts(plain, 1, 12)
    with disabled(decoder), disabled(plain):
        found.append(texts(backend, 1, 12))
        assert found[-1] == texts(plain, 1, 12)
    assert len(set(map(tuple, found))) == 3


def test_hooks_are_called() -> None:
    backend, recorder = captured()
    texts(backend, 1, 4)
    before, seen = recorder.replayed, list[int]()
    handle = backend.decoder.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert texts(backend, 1, 8) == texts(make(), 1, 8)
    assert len(seen) == 8
    assert recorder.replayed == before
    handle.remove()
    texts(backend, 1, 8)
    assert recorder.replayed > before


def test_what_cannot_be_recorded_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Callable[[], Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    backend = capturing(make(), fail)
    assert texts(backend, 2, 12) == texts(make(), 2, 12)
    assert caplog.text.count("cannot capture steps as CUDA graphs") == 1


def test_mixtures_are_refused() -> None:
    config = LOCAL_AND_GLOBAL.to_dict()
    for block in config["blocks"].values():
        block["feed_forward"] = {"kind": "moe", "d_ff": 16, "n_experts": 4, "top_k": 2}
    decoder = DecoderConfig.from_dict(config).build()
    with pytest.raises(
        WorkhorseError, match="steps cannot be captured as CUDA graphs; choose execution=auto"
    ):
        CapturedStep(decoder)


@pytest.mark.cuda
def test_a_cuda_graph_gives_the_same_texts() -> None:
    plain, backend = make().cuda(), capturing(make().cuda())
    for rows in (1, 3):
        assert texts(backend, rows, 60) == texts(plain, rows, 60)
    assert isinstance(backend.step, CapturedStep)
    assert backend.step.records
