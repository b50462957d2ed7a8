"""Edits, gradients, names and errors of traces. All model types: `tests/parity/test_taps.py`."""

import gc
import pickle
import weakref

import pytest
import torch

import workhorse
from workhorse.errors import WorkhorseError
from workhorse.execute.body import body_of
from workhorse.inspect import Tracer, attribute, attribution_graph, edge_scores, trace
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.quantization import quantize

SMALL = DecoderConfig.from_yaml("""
vocab_size: 40
d_model: 32
n_layers: 2
max_seq_len: 32
blocks:
  main:
    kind: pre_norm
    norm: {kind: rms_norm}
    attention: {n_heads: 4, n_kv_heads: 2, position: {kind: rope}}
    feed_forward: {kind: gated_mlp, d_ff: 48}
final_norm: {kind: rms_norm}
""")
TOKENS = torch.arange(20).view(2, 10)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    return SMALL.build()


def test_an_edit_changes_what_its_readers_see(decoder: Decoder) -> None:
    plain = trace(decoder, TOKENS)
    without = trace(decoder, TOKENS, edits={"layers.1.attention_branch": torch.zeros_like})
    assert torch.equal(without["layers.1.attention_sum"], without["layers.1.x"])
    assert torch.equal(without["layers.0"], plain["layers.0"])
    assert not torch.equal(without.logits, plain.logits)

    name = "layers.0.attention.k_proj.x"  # an input: q and v are computed from the original
    keys = trace(decoder, TOKENS, edits={name: torch.zeros_like})
    assert torch.equal(keys["layers.0.attention.q_proj"], plain["layers.0.attention.q_proj"])
    assert torch.equal(keys["layers.0.attention.v_proj"], plain["layers.0.attention.v_proj"])
    assert not keys["layers.0.attention.k_proj"].any()

    frozen = trace(decoder, TOKENS, edits={"layers.*.feed_forward_branch": torch.zeros_like})
    assert torch.equal(frozen["layers.1"], frozen["layers.1.attention_sum"])
    assert not any(module._forward_hooks for module in decoder.modules())


def test_gradients_are_those_of_autograd(decoder: Decoder) -> None:
    run = trace(decoder, TOKENS, gradients=True)
    found = run.gradients(run.logits[0, -1, 7], ["layers.1.x", "blocks.1.hook_resid_pre"])
    x = run["layers.1.x"].detach().requires_grad_()
    logits = decoder.unembed(decoder.final_norm(decoder.layers[1](x)))
    (expected,) = torch.autograd.grad(logits[0, -1, 7], x)
    torch.testing.assert_close(found["layers.1.x"], expected)
    assert torch.equal(found["layers.1.x"], found["blocks.1.hook_resid_pre"])
    assert all(weight.grad is None for weight in decoder.parameters())


def test_transformerlens_names_are_views(decoder: Decoder) -> None:
    def first_head_only(z: torch.Tensor) -> torch.Tensor:
        z = z.clone()
        z[:, :, 1:] = 0
        return z

    run = trace(decoder, TOKENS, edits={"blocks.1.attn.hook_z": first_head_only})
    assert run["blocks.1.attn.hook_z"].shape == (2, 10, 4, 8)  # (batch, seq, heads, width)
    assert not run["layers.1.attention.out_proj.x"][..., 8:].any()
    assert run["blocks.0.attn.hook_k"].shape == (2, 10, 2, 8)
    assert torch.equal(run["blocks.0.hook_resid_post"], run["layers.0"])


def test_a_quantised_model_is_traced_exactly(decoder: Decoder) -> None:
    quantized = SMALL.build("eager")
    quantized.load_state_dict(decoder.state_dict())
    quantize(quantized, "int8")
    run = trace(quantized, TOKENS, gradients=True)
    assert torch.equal(run.logits, quantized(TOKENS))
    assert not torch.equal(run.logits, trace(decoder, TOKENS).logits)
    assert run.gradients(run.logits.sum(), ["embedding"])["embedding"].any()


def test_a_tracer_sees_new_weights(decoder: Decoder) -> None:
    tracer = Tracer(decoder)
    before = tracer(TOKENS, keep=()).logits
    with torch.no_grad():
        decoder.head.proj.weight.mul_(2)
    after = tracer(TOKENS, keep=())
    torch.testing.assert_close(after.logits, 2 * before)
    assert list(after) == ["head"]


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"layers.7": torch.zeros_like}, "no tensor 'layers.7' in this pass"),
        ({"layers.*.nothing": torch.zeros_like}, r"no tensor 'layers.\*.nothing'"),
        ({"layers.0": lambda x: x[:1]}, r"layers.0 became torch.float32 \(1, 10, 32\)"),
        ({"layers.0": torch.Tensor.double}, "layers.0 became torch.float64"),
        ({"layers.0": lambda x: None}, "layers.0 became None"),
        ({"layers.0": 0}, "layers.0=0; give a tensor or a function"),
        ({"blocks.0.attn.hook_z": lambda x: None}, "out_proj.x became None"),
        (
            {"blocks.0.attn.hook_z": lambda x: x[0]},
            r"\(10, 4, 8\); it is .* \(2, 10, 4, 8\)",
        ),
        ({"layers.0": torch.zeros(2, 10, 32, device="meta")}, r"without values \(meta\); it is"),
        (
            {"layers.0": torch.zeros_like, "blocks.0.hook_resid_post": torch.zeros_like},
            "are the same tensor layers.0",
        ),
    ],
)
def test_wrong_edits(decoder: Decoder, edits: dict, message: str) -> None:
    with pytest.raises(WorkhorseError, match=message):
        trace(decoder, TOKENS, edits=edits)


def test_other_errors(decoder: Decoder) -> None:
    run = trace(decoder, TOKENS)
    with pytest.raises(WorkhorseError, match=r"no tensor 'layer.0'; .*layers.0"):
        run["layer.0"]
    assert run.get("layer.0") is None
    with pytest.raises(WorkhorseError, match="3 is not the name of a tensor"):
        run[3]  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkhorseError, match="keep='head' is not a list"):
        trace(decoder, TOKENS, keep="head")
    with pytest.raises(WorkhorseError, match="give a dictionary"):
        trace(decoder, TOKENS, edits=["head"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkhorseError, match="there are no tokens"):
        trace(decoder, [])
    with pytest.raises(WorkhorseError, match="gradients=True"):
        run.gradients(run.logits.sum())
    with pytest.raises(WorkhorseError, match="not token ids"):
        trace(decoder, "text")  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkhorseError, match="ids from 0 to 39"):
        trace(decoder, [40])
    with pytest.raises(WorkhorseError, match=r"model\.reference"):
        trace(body_of(decoder), TOKENS)
    model = workhorse.Model("m", decoder, None, trained=True)
    with pytest.raises(WorkhorseError, match=r"Model is not a decoder; give model\.reference"):
        attribute(model, TOKENS[0], 3)  # pyright: ignore[reportArgumentType]
    assert torch.equal(trace(model, [1, 2]).logits, trace(decoder, [1, 2]).logits)
    with pytest.raises(WorkhorseError, match="m has no tokenizer"):
        trace(model, "text")


def test_an_edit_may_change_its_argument(decoder: Decoder) -> None:
    for name in ("layers.0.attention.q_proj.x", "blocks.0.attn.hook_z"):
        by_value = trace(decoder, TOKENS, edits={name: torch.zeros_like})
        in_place = trace(decoder, TOKENS, edits={name: torch.Tensor.zero_}, gradients=True)
        assert all(torch.equal(in_place[key], tensor) for key, tensor in by_value.items())


def test_a_tracer_runs_one_pass_at_a_time(decoder: Decoder) -> None:
    tracer = Tracer(decoder)
    expected = tracer(TOKENS)
    with pytest.raises(WorkhorseError, match="make another for a pass in an edit or a thread"):
        tracer(TOKENS, edits={"layers.0": lambda x: tracer(TOKENS)["layers.0"]})
    assert torch.equal(tracer(TOKENS).logits, expected.logits)


def test_a_tracer_is_released_at_once(decoder: Decoder) -> None:
    tracer = Tracer(decoder)
    run, copy = tracer(TOKENS), weakref.ref(tracer.decoder)
    gc.disable()
    del tracer
    gc.enable()
    assert copy() is None
    assert pickle.loads(pickle.dumps(run))["blocks.0.attn.hook_z"].any()


def test_gradients_inside_no_grad(decoder: Decoder) -> None:
    expected = attribute(decoder, TOKENS[0], 3)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert attribute(decoder, TOKENS[0], 3).terms == expected.terms
            assert attribution_graph(decoder, TOKENS[0, :3], n_features=2).edges.any()
            edges = edge_scores(decoder, TOKENS, TOKENS + 1, torch.mean, method="gradient")
            assert edges.strongest(1)
            run = trace(decoder, TOKENS, gradients=True)
            with pytest.raises(WorkhorseError, match=r"compute it .* outside no_grad"):
                run.gradients(run.logits.sum())
