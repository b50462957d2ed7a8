"""Weights under their Hugging Face names, given to a model of another program."""

import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.parity import reference
from tests.parity.all_cases import ALL
from workhorse import Model, convert, load
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface import MODEL_TYPES
from workhorse.nn import Decoder
from workhorse.transforms.adapters import adapter_parameters, add_adapter
from workhorse.transforms.lora import LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore:.* has no tokenizer")
PAGE = Path(__file__).parents[2] / "docs" / "serving-elsewhere.md"


@torch.no_grad()
def changed(decoder: Decoder) -> None:
    for weight in decoder.parameters():
        weight.mul_(0.9)


@torch.no_grad()
def difference(ours: Decoder, theirs: nn.Module, tokens: Tensor) -> float:
    return float((ours(tokens) - theirs(tokens).logits).abs().max())


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3"])
def test_transformers_takes_the_tensors_of_a_changed_model(model_type: str, tmp_path: Path) -> None:
    """Renamed, transposed and joined weights; a tied head is not sent."""
    pair = reference.make(model_type, ALL[model_type][0], tmp_path / "m")
    model = load(tmp_path / "m", execution="reference", dtype="float32")
    changed(model.reference)
    assert difference(model.reference, pair.theirs, pair.tokens) > 1e-2
    with torch.no_grad():
        missing, unexpected = pair.theirs.load_state_dict(
            dict(model.huggingface_tensors()), strict=False
        )
    assert (missing, unexpected) == (["lm_head.weight"] if model.config.head.tied else [], [])
    assert difference(model.reference, pair.theirs, pair.tokens) < 1e-4


def test_tensors_are_those_of_the_written_directory(tmp_path: Path) -> None:
    """Also of a mixture of experts, whose names in memory differ, and with an adapter."""
    reference.make("mixtral", ALL["mixtral"][0], tmp_path / "m")
    model = load(tmp_path / "m", execution="reference")
    add_adapter(model.reference, LoraConfig(rank=2, targets=("q_proj",)))
    with torch.no_grad():
        for weight in adapter_parameters(model.reference).values():
            weight.add_(0.1)
    convert(model.merged(), tmp_path / "merged", "hf", dtype="bfloat16")
    written = load_file(tmp_path / "merged" / "model.safetensors")
    sent = dict(model.huggingface_tensors(torch.bfloat16))
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], written[name]) for name in written)
    before = load_file(tmp_path / "m" / "model.safetensors")
    adapted = [name for name in before if not torch.equal(before[name].bfloat16(), sent[name])]
    assert adapted
    assert all("q_proj" in name for name in adapted)


def test_quantised_weights_are_not_sent(tmp_path: Path) -> None:
    reference.make("llama", ALL["llama"][0], tmp_path / "m")
    model = load(tmp_path / "m", execution="reference", quantize="int8")
    with pytest.raises(WorkhorseError, match="quantised to int8, which cannot be written"):
        next(iter(model.huggingface_tensors()))


@dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Engine:
    """Stands for vLLM's trainer engine: receives what `send_weights` would transfer."""

    def __init__(self, init_info: Any, client: Any, source: Any) -> None:
        del init_info, client
        self.source = source
        self.planned = source.metadata
        self.received: list[dict[str, Tensor]] = []

    def send_weights(self) -> None:
        """Send every tensor in the planned order, shape and dtype, as the transport requires."""
        sent = list(self.source.iter_full())
        assert [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in sent] == self.planned
        self.received.append({name: one.clone() for name, one in sent})


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of vLLM 0.33.0 with the names that the page imports."""
    transfer = ModuleType("vllm.distributed.weight_transfer")
    nccl = ModuleType("vllm.distributed.weight_transfer.nccl_engine")
    for name, stub in {
        "HTTPVLLMWeightSyncClient": lambda url: url,
        "ParamMeta": ParamMeta,
        "WeightSource": object,
        "WeightTransferTrainerFactory": type("Factory", (), {"trainer_init": Engine}),
    }.items():
        setattr(transfer, name, stub)
    nccl.NCCLTrainerInitInfo = dict  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, transfer.__name__, transfer)
    monkeypatch.setitem(sys.modules, nccl.__name__, nccl)


@pytest.mark.usefixtures("vllm")
def test_the_loop_of_the_page_sends_the_weights_of_each_step(tmp_path: Path) -> None:
    pair = reference.make("llama", ALL["llama"][0], tmp_path / "m")
    (block,) = (
        one.partition("```")[0]
        for one in PAGE.read_text("utf-8").split("```python\n")[1:]
        if "WeightSource" in one
    )
    names: dict[str, Any] = {"train_one_step": changed}
    exec(block.replace("path/to/model", str(tmp_path / "m")), names)
    first, *_, last = names["engine"].received
    head = "model.norm.weight"
    torch.testing.assert_close(last[head], (first[head].float() * 0.9**2).bfloat16())
    model: Model = names["model"]
    assert not dict(model.huggingface_tensors())[head].isnan().any()
    missing, unexpected = pair.theirs.load_state_dict(last, strict=False)
    assert (missing, unexpected) == ([], [])


def test_the_page_lists_every_model_type_once() -> None:
    rows = re.findall(r"^\*\*.*\*\* \((\d+)\): ([^.]+)\.", PAGE.read_text("utf-8"), re.MULTILINE)
    listed = [types.replace(",", "").split() for _, types in rows]
    assert [len(types) for types in listed] == [int(count) for count, _ in rows]
    assert sorted(itertools.chain(*listed)) == sorted(MODEL_TYPES)
