"""A part that a user replaced is computed by every body or raises an error; it is never ignored."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.execute.passes import all_logits, compiled
from tests.native.machine import needs
from workhorse.data import Batch
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend, backend_of
from workhorse.execute.body import body_of
from workhorse.execute.choose import decoding_backend
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.grouped import Attention
from workhorse.nn.attention.self_attention import Rotation
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.elementwise import Multiplier
from workhorse.nn.embedding import Head
from workhorse.train import TrainConfig
from workhorse.train.step.build import build_step

COMPILES = pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
CPU = torch.device("cpu")
TOKENS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))


def small(**attention: Any) -> Decoder:
    torch.manual_seed(0)
    block = {
        "kind": "pre_norm",
        "norm": {"kind": "rms_norm"},
        "attention": {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}, **attention},
        "feed_forward": {"kind": "mlp", "d_ff": 48},
    }
    config = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "max_seq_len": 32}
    final = {"final_norm": {"kind": "rms_norm"}, "blocks": {"main": block}}
    return DecoderConfig.from_dict({**config, **final}).build()


class Half(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + 0.5 * y


class Fewer(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        z[..., :8] = 0
        return z


class Data(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        z.data[..., :8] = 0
        return z


class Alpha(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, alpha=0.5)


class Out(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        return torch.mul(input=z, other=0.5, out=z)


class Scaled(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input


class Doubled(Attention):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return 2 * q, k, v


class Slower(Rotation):
    def forward(self, x: Tensor, context: Any) -> Tensor:
        return 0.5 * super().forward(x, context)


class Cooler(Head):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


def of_class(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    made = kind.__new__(kind)
    vars(made).update(vars(module))
    return made


def in_each_layer(path: str, make: Callable[[nn.Module], object]) -> Callable[[Decoder], None]:
    def change(decoder: Decoder) -> None:
        for layer in decoder.layers:
            parent, _, name = path.rpartition(".")
            owner = layer.get_submodule(parent)
            setattr(owner, name, make(getattr(owner, name)))

    return change


def head(change: Callable[[Head], object]) -> Callable[[Decoder], None]:
    return lambda decoder: change(decoder.head) and None


def unnormed(q: Tensor, norm: nn.Module, rotation: nn.Module, context: Any) -> Tensor:
    del norm
    return -rotation(q, context)


CHANGES: dict[str, Callable[[Decoder], None]] = {
    "attention_sum": in_each_layer("attention_sum", lambda _: Half()),
    "feed_forward_sum": in_each_layer("feed_forward_sum", lambda _: Half()),
    "assignment": in_each_layer("attention_sum", lambda _: Fewer()),
    "data": in_each_layer("attention_sum", lambda _: Data()),
    "alpha": in_each_layer("attention_sum", lambda _: Alpha()),
    "out": in_each_layer("attention_sum", lambda _: Out()),
    "branch": in_each_layer("attention_branch", lambda _: Scaled()),
    "inner_norm": in_each_layer("attention.inner_norm", lambda _: Scaled()),
    "feed_forward.dropout": in_each_layer("feed_forward.dropout", lambda _: Scaled()),
    "activation": in_each_layer("feed_forward.activation", lambda _: nn.Tanh()),
    "project": in_each_layer("attention", lambda one: of_class(one, Doubled)),
    "rotation": in_each_layer("attention.q_rotation", lambda one: of_class(one, Slower)),
    "norm_and_rotate": in_each_layer("attention.norm_and_rotate", lambda _: unnormed),
    "head.multiply": head(lambda one: setattr(one, "multiply", Scaled())),
    "head.cap": head(lambda one: setattr(one, "cap", nn.Hardtanh(-0.1, 0.1))),
    "head": lambda decoder: setattr(decoder, "head", of_class(decoder.head, Cooler)),
}
TRAINED = [name for name in CHANGES if name != "out"]
EACH = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def stepped(model: Decoder | Backend) -> Tensor:
    """Logits of all tokens after a prompt of three, one token at a time."""
    cache = backend_of(model).decoder.new_paged_cache(64, 2)
    view = PagedView(cache, [cache.new_sequence() for _ in TOKENS])
    with torch.no_grad():
        parts = [all_logits(model, part, view) for part in TOKENS.split([3, *[1] * 6], dim=1)]
    return torch.cat(parts, dim=1)


def losses_and_gradient(decoder: Decoder) -> list[Tensor]:
    """Losses and gradient of the plain forward pass."""
    logits = decoder(TOKENS[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(decoder.parameters()), allow_unused=True)
    return [loss.detach(), *(one for one in gradients if one is not None)]


@pytest.mark.parametrize("change", [CHANGES[name] for name in TRAINED], ids=TRAINED)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("execution", ["auto", "reference"])
def test_training_computes_what_was_put_in(
    change: Callable[[Decoder], None], execution: str, when: str
) -> None:
    plain = small()
    reference = copy.deepcopy(plain)
    change(plain)
    if when == "before":
        change(reference)
    config = TrainConfig(steps=1, batch_size=2, seq_len=8, execution=execution)
    step = build_step(reference, config, CPU)
    if when == "after":
        change(step.objective.decoder)
    batch = Batch(TOKENS[:, :-1], TOKENS[:, 1:], None, torch.zeros(2, dtype=torch.int64))
    losses, _ = step.backward(batch)
    expected, *gradients = losses_and_gradient(plain)
    torch.testing.assert_close(losses, expected, check_dtype=False)
    trained = [one.grad for one in step.objective.parameters() if one.grad is not None]
    for found, right in zip(trained, gradients, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


@needs("steps")
@EACH
def test_native_decoding_computes_what_was_put_in(change: Callable[[Decoder], None]) -> None:
    decoder = small()
    change(decoder)
    torch.testing.assert_close(
        stepped(decoding_backend(decoder, wait=True)), stepped(decoder), rtol=1e-4, atol=1e-5
    )


@needs("steps")
def test_a_rotation_without_a_rope_is_computed_by_its_module() -> None:
    decoder = small()
    in_each_layer("attention.q_rotation", lambda _: TwoInputs())(decoder)
    assert decoding_backend(decoder, wait=True).announcement.endswith("no whole steps: TwoInputs")


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, context: Any) -> Tensor:
        del context
        return x


def halved(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return 0.5 * output


@COMPILES
def test_compiled_steps_follow_hooks_and_replaced_modules(tmp_path: Path) -> None:
    """No program with a hook or a foreign module may be stored in the shared folder."""
    reference = small(softcap=20.0)
    plain = stepped(reference)
    body = body_of(reference).eval()
    backend = compiled(body, tmp_path)
    layer = body.layers[0].feed_forward
    handle = layer.register_forward_hook(halved)
    with_hook = stepped(backend)  # first, so that a wrongly stored program would be found below
    handle.remove()
    assert not list(tmp_path.iterdir())
    torch.testing.assert_close(stepped(backend), plain, rtol=1e-4, atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 1
    handle = layer.register_forward_hook(halved)
    torch.testing.assert_close(stepped(backend), with_hook)
    handle.remove()
    body.layers[0].attention_sum = reference.layers[0].attention_sum = Half()
    torch.testing.assert_close(stepped(backend), stepped(reference), rtol=1e-4, atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 1
    for factor in (0.5, 2.0):
        body.layers[0].attention_sum = reference.layers[0].attention_sum = type(
            reference.layers[1].attention_sum
        )()
        body.layers[0].feed_forward_branch = Multiplier(factor)
        reference.layers[0].feed_forward_branch = Multiplier(factor)
        torch.testing.assert_close(stepped(backend), stepped(reference), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # the compiler warns about autograd functions
def test_compiled_training_calls_hooks_that_come_later() -> None:
    plain = small()
    config = TrainConfig(steps=1, batch_size=2, seq_len=8, execution="compiled")
    step = build_step(copy.deepcopy(plain), config, CPU)
    batch = Batch(TOKENS[:, :-1], TOKENS[:, 1:], None, torch.zeros(2, dtype=torch.int64))
    step.backward(batch)
    for decoder in (plain, step.objective.decoder):
        decoder.layers[0].register_forward_hook(halved)
    losses, _ = step.backward(batch)
    torch.testing.assert_close(losses, losses_and_gradient(plain)[0], check_dtype=False)


def test_weights_that_a_hook_computes_are_refused() -> None:
    decoder = small()
    prune.l1_unstructured(decoder.layers[1].attention.out_proj, "weight", 0.5)
    with pytest.raises(WorkhorseError, match=r"a hook computes layers.1.attention.out_proj.weight"):
        body_of(decoder)
    prune.remove(decoder.layers[1].attention.out_proj, "weight")
    body_of(decoder)


def test_a_dtype_without_operators_runs_the_reference() -> None:
    decoder = small().half()
    assert decoding_backend(decoder, wait=True).announcement == (
        "decode: reference; no native operator computes in torch.float16"
    )
    with pytest.raises(WorkhorseError, match="execution=native needs native operators: no native"):
        decoding_backend(decoder, "native")
