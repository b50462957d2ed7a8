import pytest
import torch
from torch import nn

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.optim.adamw import AdamW, AdamWConfig
from workhorse.optim.groups import build_optimizer, check_base_width, parameters_by_role
from workhorse.optim.muon import Muon, MuonConfig, iteration_dtype, orthogonalize, update_scale


def set_gradients(parameters) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def test_every_parameter_has_one_role(decoder: Decoder) -> None:
    roles = parameters_by_role(decoder)
    named = [name for parameters in roles.values() for name in parameters]
    assert sorted(named) == sorted(name for name, _ in decoder.named_parameters())
    assert set(roles["embedding"]) == {"embedding.tokens.weight"}
    assert not roles["head"]  # it is tied
    assert all(name.endswith("_proj.weight") for name in roles["hidden"])
    assert all("norm" in name for name in roles["vector"])


def test_untied_head_and_learned_positions_have_their_roles(decoder: Decoder) -> None:
    fields = decoder.config.to_dict()
    fields["head"] = {"tied": False, "bias": True}
    fields["embedding"]["position"] = {"kind": "learned"}
    fields["blocks"]["main"]["attention"]["position"] = {"kind": "none"}
    roles = parameters_by_role(DecoderConfig.from_dict(fields).build())
    assert set(roles["head"]) == {"head.proj.weight"}
    assert "head.proj.bias" in roles["vector"]
    assert len(roles["embedding"]) == 2


def test_adamw_is_the_one_of_pytorch() -> None:
    ours = nn.Parameter(torch.randn(5, 3))
    theirs = nn.Parameter(ours.detach().clone())
    config = AdamWConfig(learning_rate=0.1, weight_decay=0.2)
    mine = AdamW({"weight": ours}, config, weight_decay=0.2)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    for schedule in (1.0, 0.5, 0.1):
        ours.grad = torch.randn(5, 3)
        theirs.grad = ours.grad.clone()
        mine.step(schedule)
        reference.param_groups[0]["lr"] = 0.1 * schedule
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_base_width_gives_matrices_the_rate_of_a_model_of_that_width(decoder: Decoder) -> None:
    """After one step each element of a matrix has moved by the rate; the decay is unchanged."""
    fields = decoder.config.to_dict() | {"head": {"tied": False, "bias": True}}
    wide = DecoderConfig.from_dict(fields).build(dtype=torch.float32)
    width = wide.config.d_model
    config = AdamWConfig(learning_rate=0.1, weight_decay=0.5, base_width=width // 4)
    roles = parameters_by_role(wide)
    before = {name: weight.detach().clone() for name, weight in wide.named_parameters()}
    set_gradients(wide.parameters())
    build_optimizer(wide, config).step(1.0)
    for role, parameters in roles.items():
        matrices = role in ("hidden", "head")
        rate, kept = (0.1 / 4, 1 - 0.1 * 0.5) if matrices else (0.1, 1.0)
        for name, weight in parameters.items():
            moved = weight - before[name] * kept
            assert weight.grad is not None
            expected = -rate * weight.grad.sign()
            torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


def test_a_base_width_that_nothing_follows_is_refused(decoder: Decoder) -> None:
    muon = MuonConfig(adamw=AdamWConfig(base_width=4))
    with pytest.raises(
        WorkhorseError, match=r"base_width=4 has no effect: .* an untied head, .* remove it"
    ):
        check_base_width(decoder, muon)
    fields = decoder.config.to_dict() | {"head": {"tied": False}}
    check_base_width(DecoderConfig.from_dict(fields).build(), muon)


def test_a_base_width_beside_matrices_drawn_alike_at_any_width_is_refused(decoder: Decoder) -> None:
    drawn_alike = decoder.config.to_dict() | {"init": {"kind": "normal", "std": 0.5}}
    wide = DecoderConfig.from_dict(drawn_alike).build()
    narrower = AdamWConfig(base_width=4)
    with pytest.raises(WorkhorseError, match=r"base_width=4 .* a std of 0\.5 .*=\{kind: fan_in\}"):
        check_base_width(wide, narrower)
    check_base_width(wide, narrower, drawn=False)
    check_base_width(wide, AdamWConfig(base_width=wide.config.d_model))
    by_width = drawn_alike | {"init": {"kind": "fan_in"}}
    check_base_width(DecoderConfig.from_dict(by_width).build(), narrower)


def test_a_narrow_mean_is_rounded_and_nothing_else() -> None:
    """One update compared with the exact one: only the mean differs, by its rounding."""
    start, gradient = torch.randn(2, 300, 1000)  # more than one chunk
    exact, narrow = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    pairs = []
    for weight, dtype in ((exact, "float32"), (narrow, "bfloat16")):
        config = AdamWConfig.from_dict({"mean_dtype": dtype})
        weight.grad = gradient.clone()
        adamw = AdamW({"w": weight}, config, weight_decay=0.1)
        adamw.step(1.0, 0.5)
        pairs.append(adamw.tensors())
    torch.testing.assert_close(narrow, exact, rtol=0, atol=1e-7)
    assert torch.equal(pairs[1]["w.mean"], pairs[0]["w.mean"].bfloat16())
    assert torch.equal(pairs[1]["w.mean_square"], pairs[0]["w.mean_square"])
    assert torch.equal(pairs[1]["w.updates"], pairs[0]["w.updates"])


@pytest.mark.parametrize("config", [AdamWConfig(weight_decay=0.5), MuonConfig(weight_decay=0.5)])
def test_only_matrices_that_multiply_decay(decoder: Decoder, config) -> None:
    before = {name: weight.detach().clone() for name, weight in decoder.named_parameters()}
    optimizer = build_optimizer(decoder, config)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    shrunk = {
        name for name, weight in decoder.named_parameters() if not torch.equal(weight, before[name])
    }
    assert shrunk == set(parameters_by_role(decoder)["hidden"])
    some = next(iter(shrunk))
    kept = 1 - config.learning_rate * config.weight_decay
    torch.testing.assert_close(dict(decoder.named_parameters())[some], before[some] * kept)


def test_embeddings_decay_where_asked(decoder: Decoder) -> None:
    before = decoder.embedding.tokens.weight.detach().clone()
    optimizer = build_optimizer(decoder, AdamWConfig(weight_decay=0.5, decay_embeddings=True))
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    torch.testing.assert_close(decoder.embedding.tokens.weight, before * (1 - 1e-3 * 0.5))


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 5, 12)])
def test_orthogonal_updates_keep_directions_and_level_sizes(shape: tuple[int, ...]) -> None:
    """Singular values of a tenth to 1. Five iterations do not level much smaller ones."""
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrix = (u * torch.linspace(0.1, 1, u.shape[-1])) @ vh
    result = orthogonalize(matrix).float()
    assert result.shape == matrix.shape
    sizes = torch.linalg.svdvals(result)
    assert sizes.min() > 0.5
    assert sizes.max() < 1.3
    nearest = u @ vh
    cosine = (result * nearest).sum((-2, -1)) / (
        result.norm(dim=(-2, -1)) * nearest.norm(dim=(-2, -1))
    )
    assert cosine.min() > 0.97


def test_the_meta_device_iterates_in_bfloat16_like_a_gpu() -> None:
    assert iteration_dtype(torch.empty(2, 3, device="meta")) == torch.bfloat16


def test_matrices_of_a_batch_do_not_mix() -> None:
    first, second = torch.randn(2, 6, 9)
    together = orthogonalize(torch.stack([first, second * 1000]))
    torch.testing.assert_close(together[0], orthogonalize(first), atol=1e-2, rtol=1e-2)


def test_match_adamw_gives_updates_of_adamws_size() -> None:
    """For an orthogonal update; `orthogonalize` comes close to one."""
    u, _, vh = torch.linalg.svd(torch.randn(64, 256), full_matrices=False)
    update = u @ vh * update_scale("match_adamw", 64, 256)
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize(("rows", "columns", "scale"), [(64, 16, 2.0), (16, 64, 1.0)])
def test_spectral_scale(rows: int, columns: int, scale: float) -> None:
    assert update_scale("spectral", rows, columns) == scale


def test_muon_updates_as_its_formula_says() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    start = weight.detach().clone()
    gradient = torch.randn(4, 6)
    config = MuonConfig(learning_rate=0.1, weight_decay=0.2, momentum=0.9)
    muon = Muon({"weight": weight}, config)
    weight.grad = gradient.clone()
    muon.step(0.5)
    momentum = gradient * 0.1
    nesterov = gradient * 0.1 + momentum * 0.9
    step = orthogonalize(nesterov).float() * 0.2 * 6**0.5
    torch.testing.assert_close(weight, start * (1 - 0.05 * 0.2) - 0.05 * step, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(muon.tensors()["weight.momentum"], momentum)


@pytest.mark.parametrize(
    "config", [AdamWConfig(), AdamWConfig(mean_dtype="bfloat16"), MuonConfig()]
)
def test_state_moves_to_another_optimizer(decoder: Decoder, config) -> None:
    copy = DecoderConfig.from_dict(decoder.config.to_dict()).build()
    first, second = build_optimizer(decoder, config), build_optimizer(copy, config)
    set_gradients(decoder.parameters())
    first.step(1.0)
    copy.load_state_dict(decoder.state_dict())
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()})
    set_gradients(decoder.parameters())
    for mine, other in zip(decoder.parameters(), copy.parameters(), strict=True):
        other.grad = mine.grad.clone()
    first.step(0.7)
    second.step(0.7)
    for mine, other in zip(decoder.parameters(), copy.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_state_of_another_model_is_refused(decoder: Decoder) -> None:
    optimizer = build_optimizer(decoder, AdamWConfig())
    state = optimizer.tensors()
    name, tensor = state.popitem()
    with pytest.raises(WorkhorseError, match="belong to different runs"):
        optimizer.load(state)
    with pytest.raises(WorkhorseError, match="belong to different runs"):
        optimizer.load({**state, name: tensor[None]})


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()])
def test_what_is_frozen_has_no_state_and_stays(decoder: Decoder, config) -> None:
    """A whole layer and the embedding are frozen, as in the training of an adapter."""
    decoder.layers[0].requires_grad_(False)
    decoder.embedding.requires_grad_(False)
    before = {name: weight.detach().clone() for name, weight in decoder.named_parameters()}
    optimizer = build_optimizer(decoder, config)
    set_gradients(weight for weight in decoder.parameters() if weight.requires_grad)
    optimizer.step(1.0)
    moved = {n for n, weight in decoder.named_parameters() if not torch.equal(weight, before[n])}
    trained = {name for name, weight in decoder.named_parameters() if weight.requires_grad}
    assert moved == trained
    assert {name.rpartition(".")[0] for name in optimizer.tensors()} == trained
