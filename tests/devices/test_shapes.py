"""Results with cached shapes equal the results of the operators."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.plan.families import LATENT, small
from workhorse.devices.tape import ShapeCache, stand_in, without_data
from workhorse.memory.step_memory import PlannedStep, step_memory
from workhorse.parallel.config import ParallelismConfig
from workhorse.train.recipe.training import TrainConfig

DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda")}
SHALLOW = {"num_hidden_layers": 2}
aten = torch.ops.aten
devices = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Disables the shape cache from the call on: every operator finds its shapes itself."""

    def change() -> None:
        monkeypatch.setattr(ShapeCache, "call", lambda _, func, args, kwargs: func(*args, **kwargs))

    return change


def facts(made: Any) -> list[Any]:
    return [
        (tuple(one.shape), one.stride(), one.dtype, one.device, type(one), one.storage_offset())
        if isinstance(one, Tensor)
        else one
        for one in tree_leaves(made)
    ]


def calls(device: torch.device) -> list[Any]:
    """Calls of operators with one and several results, equal numbers of other types, and None."""
    whole, half = (
        torch.empty(4, 6, dtype=dtype, device=device) for dtype in (torch.int64, torch.bfloat16)
    )
    q = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device=device)
    return [
        *(aten.mul.Tensor(whole, torch.empty(6, device=device)) for _ in range(2)),
        *(aten.add.Scalar(whole, number) for number in (1, 1.0, True, 1)),
        *(aten.mm(half, half.t()) for _ in range(2)),
        *(aten.mm(half.t(), half) for _ in range(2)),
        *(aten.native_layer_norm(half, [6], None, None, 1e-5) for _ in range(2)),
        *(aten.sum.dim_IntList(half, [0], keepdim) for keepdim in (False, True)),
        *(aten._scaled_dot_product_flash_attention(q, q, q) for _ in range(2) if q.is_meta),
        *(aten.sort.default(half, dim) for dim in (0, 1, 0)),
    ]


@devices
def test_operators_give_the_same_twice(device: torch.device, plainly: Any) -> None:
    here = stand_in(device)
    with without_data(here):
        found = [facts(made) for made in calls(here)]
    plainly()
    with without_data(here):
        assert found == [facts(made) for made in calls(here)]


@devices
def test_what_shares_memory_goes_on_to_share_it(device: torch.device) -> None:
    here = stand_in(device)
    with without_data(here):
        x = torch.empty(4, 6, device=here)
        for _ in range(2):
            for made in (x.view(6, 4), aten._unsafe_view(x, [24]), x.add_(1), *x.split([1, 3])):
                assert made.untyped_storage()._cdata == x.untyped_storage()._cdata
            first, second = aten.add.Scalar(x, 1), aten.add.Scalar(x, 1)
            assert len({one.untyped_storage()._cdata for one in (x, first, second)}) == 3


@devices
def test_the_default_dtype_decides_too(device: torch.device) -> None:
    here, dtypes = stand_in(device), [torch.float32, torch.bfloat16, torch.float32]
    before = torch.get_default_dtype()
    try:
        with without_data(here):
            whole = torch.empty(3, dtype=torch.int64, device=here)
            for dtype in dtypes:
                torch.set_default_dtype(dtype)
                made = torch.empty(2, device=here), whole / 2
                assert [one.dtype for one in made] == [dtype, dtype]
    finally:
        torch.set_default_dtype(before)


def test_tensors_of_meta_stay_so_among_those_of_a_cpu() -> None:
    with without_data():
        for _ in range(2):
            x = torch.empty(3, 4, device="meta")
            made = x, x.view(12), x.detach(), x + 1, torch.nn.Parameter(x)
            assert all(one.is_meta for one in made)
            assert not any(one.is_meta for one in (torch.empty(3, 4), torch.empty(3, 4).t()))


def test_what_has_data_keeps_it() -> None:
    """Tensors with data, such as the counts of a batch, are computed as usual."""
    with without_data(torch.device("meta")):
        for number in (1, 2, 1):
            assert aten.add.Scalar(torch.tensor([3]), number).tolist() == [3 + number]


@devices
@pytest.mark.parametrize(("dtype", "packed"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize(
    "config",
    [small("gemma2", **SHALLOW), small("deepseek_v3", **LATENT, **SHALLOW)],
    ids=["gemma2", "deepseek_v3"],
)
def test_a_step_is_recorded_as_if_nothing_were_remembered(
    config: Any, dtype: Any, packed: bool, device: torch.device, plainly: Any
) -> None:
    """The recorded memory is the same with the shape cache; also for the first of two stages."""
    train = TrainConfig(steps=1, batch_size=4, seq_len=12, micro_batch_size=2, dtype=dtype)
    step = PlannedStep(config, train, device, packed=packed)
    divided = PlannedStep(config, train, device, ParallelismConfig(pipeline=2))
    cases = [(step, None), *([(divided, 0)] if packed else [])]
    found = [step_memory(case, stage=stage) for case, stage in cases]
    plainly()
    assert found == [step_memory(case, stage=stage) for case, stage in cases]
