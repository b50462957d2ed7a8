"""Ablation, activation patching, path patching and edge scores, on small decoders."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inspect.circuits import CIRCUITS, auroc
from workhorse.errors import WorkhorseError
from workhorse.inspect import Edges, Place, ablate, edge_scores, patch, patch_path, trace
from workhorse.inspect.interventions import Replacement
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.adapters import adapter_parameters, add_adapter
from workhorse.transforms.lora import LoraConfig
from workhorse.transforms.quantization import quantize

NORM = {"kind": "rms_norm"}
ATTENTION = {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}}
WIRINGS = {
    "pre_norm": {},
    "post_norm": {},
    "reordered_norm": {},
    "sandwich_norm": {},
    "parallel": {"norms": 2},
    "normed_residual": {"kind": "pre_norm", "norm_residual": True},
    "output_gate": {"kind": "parallel", "attention": {**ATTENTION, "output_gate": True}},
}
CLEAN, CORRUPT = [1, 2, 3, 4, 5], [1, 2, 6, 4, 5]
VALUES, LOGITS = "layers.1.attention.kernel.v", Place("head.x")


def make(wiring: str = "pre_norm", **changes: object) -> Decoder:
    torch.manual_seed(0)
    block = {
        "kind": wiring,
        "norm": NORM,
        "attention": ATTENTION,
        "feed_forward": {"kind": "gated_mlp", "d_ff": 12},
        **WIRINGS[wiring],
        **changes,
    }
    return DecoderConfig.from_dict(
        {
            "vocab_size": 10,
            "d_model": 32,
            "n_layers": 2,
            "max_seq_len": 8,
            "blocks": {"main": block},
            "final_norm": NORM,
            "init": {"kind": "normal", "std": 0.3},
        }
    ).build(dtype=torch.float64)


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 7] - logits[:, -1, 8]).mean()


def test_ablation_equals_edits() -> None:
    decoder = make()
    run, other = trace(decoder, CLEAN), trace(decoder, CORRUPT)
    kernel, neurons = "layers.1.attention.kernel", "layers.0.feed_forward.down_proj.x"
    new: dict[Replacement, tuple[Tensor, ...]] = {
        "zero": (torch.zeros_like(run[kernel]), torch.zeros_like(run[neurons])),
        "mean": tuple(other[n].mean((0, -2), keepdim=True) for n in (kernel, neurons)),
        "resample": (other[kernel], other[neurons]),
    }
    for by, (head_value, neuron_value) in new.items():
        found = ablate(decoder, CLEAN, metric, parts="neurons", by=by, others=CORRUPT)
        heads, units = run[kernel].clone(), run[neurons].clone()
        heads[:, 2] = head_value[:, 2]
        units[..., 5] = neuron_value[..., 5]
        for name, value, place in ((kernel, heads, 2), (neurons, units, 5)):
            edited = trace(decoder, CLEAN, edits={name: value}).logits
            assert found[name][place] == pytest.approx(float(metric(edited) - metric(run.logits)))
    assert found["layers.1.feed_forward.down_proj.x"].shape == (12,)
    assert list(ablate(decoder, CLEAN, metric, names=[kernel])) == [kernel]


@pytest.mark.parametrize("wiring", WIRINGS)
def test_patches_of_every_wiring(wiring: str) -> None:
    decoder = make(wiring)
    found = patch(decoder, CLEAN, CORRUPT, metric)
    restored = found.restored["x"]
    assert restored[0] == pytest.approx([0, 0, 1, 0, 0], abs=1e-6)  # only that token differs
    assert restored[:, :2] == pytest.approx(torch.zeros(2, 2), abs=1e-6)
    assert found.values.keys() == {"x", "attention_branch", "feed_forward_branch"}

    # For a small change, the exact effects of edges are their gradients.
    table = decoder.get_parameter("embedding.tokens.weight")
    with torch.no_grad():
        table[6] = table[3] + 1e-5 * torch.randn(32)
    exact = edge_scores(decoder, CLEAN, CORRUPT, metric)
    linear = edge_scores(decoder, CLEAN, CORRUPT, metric, method="gradient")
    scale = exact.scores.abs().nan_to_num().max().item()
    assert torch.allclose(exact.scores, linear.scores, atol=0.01 * scale, equal_nan=True)
    in_layer = 0 if wiring in ("parallel", "output_gate") else 4  # from heads to the feed-forward
    edges = (9 + 9 + 1) + (in_layer + 5 * (9 + 1)) + (in_layer + 5 * 1)
    assert exact.scores.isfinite().sum() == edges


def test_gradients_are_exact_if_the_decoder_is_linear() -> None:
    decoder = make(
        norm={"kind": "none"},
        feed_forward={"kind": "mlp", "d_ff": 12, "activation": "relu", "bias": True},
    )
    decoder.final_norm = torch.nn.Identity()
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "q_proj" in name:
                weight.zero_()  # equal weights for all keys
            elif name.endswith("up_proj.bias"):
                weight.fill_(100)  # no neuron is ever off
    exact = edge_scores(decoder, CLEAN, CORRUPT, metric)
    linear = edge_scores(decoder, CLEAN, CORRUPT, metric, method="gradient")
    assert torch.allclose(exact.scores, linear.scores, atol=1e-4, equal_nan=True)
    assert exact.scores.abs().nan_to_num().max() > 0.01
    into = exact.scores[:, -1].sum()  # all that the logits read
    whole = metric(trace(decoder, CORRUPT).logits) - metric(trace(decoder, CLEAN).logits)
    assert into == pytest.approx(float(whole), abs=1e-5)


def test_a_path_is_one_edge_and_excludes_all_others() -> None:
    decoder = make()
    source, receiver = Place("layers.0.attention.kernel", 1), Place(VALUES, 0)
    edges = edge_scores(decoder, CLEAN, CORRUPT, metric)
    effect = patch_path(decoder, CLEAN, CORRUPT, metric, source=source, receivers=[receiver])
    assert effect == pytest.approx(_score(edges, source, receiver))

    # By hand: only the head's own change is in the residual stream.
    good, bad = trace(decoder, CLEAN), trace(decoder, CORRUPT)
    mixed = good[source.name].clone()
    mixed[:, 1] = bad[source.name][:, 1]
    weight = decoder.get_parameter("layers.0.attention.out_proj.weight")
    change = (mixed - good[source.name]).transpose(1, 2).flatten(2) @ weight.T
    block: Any = decoder.layers[1]
    values = block.attention.v_proj(block.attention_norm(good["layers.1.x"] + change))
    new = good[VALUES].clone()
    new[:, 0] = values.unflatten(-1, (2, -1)).transpose(1, 2)[:, 0]
    patched = trace(decoder, CLEAN, edits={VALUES: new})
    assert effect == pytest.approx(float(metric(patched.logits) - metric(good.logits)))
    assert abs(edges.strongest(1)[0][2]) == edges.scores.abs().nan_to_num().max()


@pytest.mark.parametrize(
    "name", ["induction (by keys)", "two hops by queries", "AND of two heads", "indirect object"]
)
def test_exact_patching_finds_the_edges_of_a_known_circuit(name: str) -> None:
    made = CIRCUITS[name](0)
    edges = edge_scores(made.decoder, made.clean, made.corrupt, made.metric)
    strongest = {(source, receiver) for source, receiver, _ in edges.strongest(len(made.edges))}
    assert strongest == made.edges
    assert auroc(edges, made.edges) == 1


def test_a_quantised_decoder_with_an_adapter() -> None:
    decoder = make().float()
    quantize(decoder, "int8")
    add_adapter(decoder, LoraConfig(rank=2))
    for weight in adapter_parameters(decoder).values():
        weight.data += 0.1 * torch.randn_like(weight)
    exact = edge_scores(decoder, CLEAN, CORRUPT, metric, receivers=[LOGITS])
    linear = edge_scores(decoder, CLEAN, CORRUPT, metric, method="gradient", receivers=[LOGITS])
    assert exact.scores.shape == (11, 1)
    assert torch.corrcoef(torch.cat((exact.scores, linear.scores), 1).T)[0, 1] > 0.9


def test_mistakes() -> None:
    decoder = make()
    with pytest.raises(WorkhorseError, match=r"corrupt has shape \(1, 2\); give the shape of"):
        patch(decoder, CLEAN, [1, 2], metric)
    with pytest.raises(WorkhorseError, match="metric did not return a scalar"):
        ablate(decoder, CLEAN, lambda logits: logits)
    with pytest.raises(WorkhorseError, match=r"kernel\[4\]: 4 is not one of 4; count from 0"):
        edge_scores(
            decoder, CLEAN, CORRUPT, metric, sources=[Place("layers.0.attention.kernel", 4)]
        )
    with pytest.raises(WorkhorseError, match="give others"):
        ablate(decoder, CLEAN, metric, by="resample")
    with pytest.raises(WorkhorseError, match=r"'layers\.9' is not one of"):
        ablate(decoder, CLEAN, metric, names=["layers.9"])
    wrong: Any = "nope"
    with pytest.raises(WorkhorseError, match="by='nope' is unknown; choose zero, mean, resample"):
        ablate(decoder, CLEAN, metric, by=wrong)
    with pytest.raises(WorkhorseError, match="parts='nope' is unknown; choose sublayers, heads"):
        ablate(decoder, CLEAN, metric, parts=wrong)
    with pytest.raises(WorkhorseError, match="method='nope' is unknown; choose exact, gradient"):
        edge_scores(decoder, CLEAN, CORRUPT, metric, method=wrong)
    with pytest.raises(WorkhorseError, match="kinds='x' is not a list"):
        patch(decoder, CLEAN, CORRUPT, metric, kinds="x")
    with pytest.raises(WorkhorseError, match="receivers='nope'; give a list of Place"):
        patch_path(decoder, CLEAN, CORRUPT, metric, source=LOGITS, receivers=wrong)
    with pytest.raises(WorkhorseError, match="hook_z is a name of TransformerLens; give ours"):
        Place("blocks.0.attn.hook_z", 1)
    with pytest.raises(WorkhorseError, match="is not an index"):
        Place("head.x", 1.5)  # pyright: ignore[reportArgumentType]


def test_tensors_that_are_not_of_one_sequence() -> None:
    mixture = {"kind": "moe", "n_experts": 2, "top_k": 1, "d_ff": 4}
    decoder = make(feed_forward=mixture)
    with pytest.raises(WorkhorseError, match=r"router\.x has 50 rows for 10 sequences"):
        patch(decoder, CLEAN, CORRUPT, metric, kinds=["feed_forward.router.x"])


def test_the_residual_stream_as_source() -> None:
    decoder = make()
    effects = [
        patch_path(decoder, CLEAN, CORRUPT, metric, source=Place(name), receivers=[LOGITS])
        for name in ("layers.0", "layers.1.x")
    ]
    assert effects[0] == effects[1] != 0


def _score(edges: Edges, source: Place, receiver: Place) -> float:
    return edges.scores[edges.sources.index(source), edges.receivers.index(receiver)].item()
