"""All kernels give the same results; a kernel rejects options that it does not support."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nn.grid import COVERING, configs, error, make, name, random_tokens, refused
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import Eager, Flex, Kernel, Scoring, Sdpa, make_kernel
from workhorse.nn.attention.masks import AttentionPattern, Placement

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
every_config = pytest.mark.parametrize("config", COVERING, ids=map(name, range(len(COVERING))))

Inputs = Callable[[], dict[str, torch.Tensor]]
SEQ = 12
TOLERANCE = 1e-5


def packed() -> dict[str, torch.Tensor]:
    return {"documents": torch.tensor([[0] * 5 + [1] * 7, [0] * SEQ])}


def padded() -> dict[str, torch.Tensor]:
    lengths = torch.tensor([[SEQ], [SEQ - 4]])
    return {"positions": (torch.arange(SEQ) - SEQ + lengths).clamp(min=-1)}


INPUTS = [dict, packed, padded]


@torch.no_grad()
def assert_equals_eager(config: DecoderConfig, kernel: str, inputs: Sequence[Inputs]) -> None:
    tokens = random_tokens(config, 2, SEQ)
    eager, other = make(config, "eager"), make(config, kernel)
    for given_by in inputs:
        extra = given_by()
        assert error(other(tokens, **extra), eager(tokens, **extra)) <= TOLERANCE, given_by


@every_config
def test_sdpa_gives_the_eager_numbers(config: DecoderConfig) -> None:
    if not refused(config, "sdpa"):
        assert_equals_eager(config, "sdpa", INPUTS)


@every_config
def test_uncompiled_flex_gives_the_eager_numbers(config: DecoderConfig) -> None:
    """One kind of input per config, in turn, and one layer of each kind, because this is slow."""
    if not refused(config, "flex-uncompiled"):
        shallow = config.replace(n_layers=len(config.blocks), pattern=tuple(config.blocks))
        assert_equals_eager(shallow, "flex-uncompiled", [INPUTS[COVERING.index(config) % 3]])


@settings(max_examples=25)
@given(configs, st.sampled_from(INPUTS))
def test_sdpa_gives_the_eager_numbers_in_any_combination(
    config: DecoderConfig, given_by: Inputs
) -> None:
    if not refused(config, "sdpa"):
        assert_equals_eager(config, "sdpa", [given_by])


@every_config
def test_sdpa_gives_the_eager_gradients(config: DecoderConfig) -> None:
    if refused(config, "sdpa"):
        return
    tokens = random_tokens(config, 2, SEQ)
    gradients = []
    for kernel in ("eager", "sdpa"):
        decoder = make(config, kernel)
        decoder(tokens).log_softmax(-1)[..., 0].sum().backward()
        gradients.append({n: p.grad for n, p in decoder.named_parameters() if p.requires_grad})
    for key, reference in gradients[0].items():
        assert error(gradients[1][key], reference) <= 10 * TOLERANCE, key


@every_config
@pytest.mark.parametrize("kernel", ["auto", "eager", "sdpa", "flex", "flex-uncompiled"])
def test_what_a_kernel_cannot_express_is_refused(config: DecoderConfig, kernel: str) -> None:
    if not refused(config, kernel):
        config.build(kernel, device="meta")
        return
    with pytest.raises(
        WorkhorseError, match=rf"^kernel={kernel} cannot run this model: "
    ) as caught:
        config.build(kernel, device="meta")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; use kernel=eager")


def test_auto_is_sdpa_where_it_can_be() -> None:
    plain, capped = Scoring(scale=1.0), Scoring(scale=1.0, softcap=1.0)
    assert type(make_kernel("auto", AttentionPattern(), plain, 2)) is Sdpa
    assert type(make_kernel("auto", AttentionPattern(), capped, 2)) is Eager


PATTERNS = [
    AttentionPattern(),
    AttentionPattern(window=3),
    AttentionPattern(chunk=4),
    AttentionPattern(causal=False),
    AttentionPattern(alibi_slopes=(0.5, 0.25)),
    AttentionPattern(alibi_slopes=(0.5, 0.25), alibi_scale=0.3, alibi_bfloat16=True),
]
KERNELS = [Eager, Sdpa, Flex]


def attend(
    kernel: Kernel, pattern: AttentionPattern, place: Placement, *, gradients: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    rows, seq = place.queries.shape
    q, k, v = (torch.randn(rows, 2, seq, 4, requires_grad=gradients) for _ in range(3))
    with torch.set_grad_enabled(gradients):
        y = kernel(q, k, v, kernel.render(pattern, place, torch.float32))
    if gradients:
        y.square().sum().backward()
    return y, [x.grad for x in (q, k, v) if x.grad is not None]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", KERNELS)
def test_a_row_that_may_attend_to_nothing_gives_zeros(
    pattern: AttentionPattern, sinks: bool, kind: type[Kernel]
) -> None:
    scoring = Scoring(scale=0.5, sinks=sinks)
    if kind.refusal(pattern, scoring):
        pytest.skip("refused")
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3], [-1, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, 5]])
    y, _ = attend(kind(scoring, 2), pattern, Placement(positions, positions))
    alone = positions < 0
    assert torch.count_nonzero(y.transpose(1, 2)[alone]) == 0
    assert (y.transpose(1, 2)[~alone].abs().sum(dim=(-1, -2)) > 0).all()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("kind", [Eager, Sdpa])
def test_a_row_that_may_attend_to_nothing_has_finite_gradients(
    pattern: AttentionPattern, kind: type[Kernel]
) -> None:
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3], [-1] * 6])
    place = Placement(positions, positions)
    _, gradients = attend(kind(Scoring(scale=0.5), 2), pattern, place, gradients=True)
    assert len(gradients) == 3
    for gradient in gradients:
        assert torch.isfinite(gradient).all()
        assert torch.count_nonzero(gradient.transpose(1, 2)[positions < 0]) == 0


@pytest.mark.parametrize("kind", KERNELS)
def test_one_query_behind_many_keys_sees_them_all(kind: type[Kernel]) -> None:
    """`is_causal` is aligned to the top left: with it, one query would see only the first key."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    keys = torch.arange(7)[None]
    place = Placement(keys[:, -1:], keys, last=True)
    kernel = kind(Scoring(scale=0.5), 2)
    y = kernel(q, k, v, kernel.render(AttentionPattern(), place, torch.float32))
    expected = (q.double() @ k.double().mT * 0.5).softmax(-1) @ v.double()
    assert torch.allclose(y.double(), expected, atol=1e-6)


@pytest.mark.parametrize("kind", KERNELS)
def test_attention_against_its_formula_in_float64(kind: type[Kernel]) -> None:
    """Scale, soft-cap, ALiBi, mask and sinks, in that order."""
    scoring = Scoring(scale=0.7, softcap=1.5, sinks=True)
    pattern = AttentionPattern(window=4, alibi_slopes=(0.5, 0.25), alibi_scale=0.3)
    if kind is Sdpa:
        scoring = Scoring(scale=0.7)
    kernel = kind(scoring, 2)
    if kernel.sinks is not None:
        kernel.sinks.data = torch.tensor([0.4, -1.0])
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, 4) for _ in range(3))
    positions = torch.arange(9)[None]
    place = Placement(positions, positions, aligned=True)
    with torch.no_grad():
        y = kernel(q, k, v, kernel.render(pattern, place, torch.float32))
    expected = torch.zeros(2, 2, 9, 4, dtype=torch.float64)
    for row, head, i in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(9)):
        total, sum_of_values = 0.0, torch.zeros(4, dtype=torch.float64)
        if scoring.sinks:
            total += math.exp((0.4, -1.0)[head])
        for j in range(max(0, i - 3), i + 1):
            score = 0.7 * float(q[row, head, i].double() @ k[row, head, j].double())
            if scoring.softcap:
                score = 1.5 * math.tanh(score / 1.5)
            score -= (0.5, 0.25)[head] * int(i - j) * 0.3
            total += math.exp(score)
            sum_of_values += math.exp(score) * v[row, head, j].double()
        expected[row, head, i] = sum_of_values / total
    assert torch.allclose(y.double(), expected, atol=1e-6)


def one_layer(kernel: str, **attention: object) -> Decoder:
    block = {
        "kind": "pre_norm",
        "norm": {"kind": "rms_norm"},
        "attention": {"n_heads": 2, **attention},
        "feed_forward": {"kind": "mlp", "d_ff": 8},
    }
    sizes = {"vocab_size": 29, "d_model": 16, "n_layers": 1, "max_seq_len": 16}
    return DecoderConfig.from_dict({**sizes, "blocks": {"main": block}}).build(kernel)


def test_eager_exposes_the_weights() -> None:
    """The module `weights` outputs the attention map; its rows sum to 1."""
    decoder = one_layer("eager")
    maps: list[torch.Tensor] = []
    for module in decoder.modules():
        if isinstance(module, Eager):
            module.weights.register_forward_hook(lambda _m, _i, weights: maps.append(weights))
    decoder(random_tokens(decoder.config, 1, 6))
    assert len(maps) == decoder.config.n_layers
    for weights in maps:
        assert weights.shape == (1, 2, 6, 6)
        assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 6))
        assert torch.count_nonzero(weights.triu(diagonal=1)) == 0


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_dropout_acts_on_the_weights_in_training_only(kernel: str) -> None:
    torch.manual_seed(0)
    scoring = Scoring(scale=0.5, dropout=0.5)
    attention = make_kernel(kernel, AttentionPattern(), scoring, 2)
    q, k, v = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), torch.ones(1, 2, 8, 4)
    positions = torch.arange(8)[None]
    place = Placement(positions, positions, aligned=True)
    mask = attention.render(AttentionPattern(), place, torch.float32)
    assert torch.allclose(attention.eval()(q, k, v, mask), torch.ones(1, 2, 8, 4))
    dropped = attention.train()(q, k, v, mask)
    assert (dropped - 1).abs().max() > 0.1
    assert abs(dropped.mean().item() - 1) < 0.4  # kept weights are scaled up


def test_flex_has_no_backward_on_a_cpu() -> None:
    decoder = one_layer("flex")
    with pytest.raises(
        WorkhorseError, match=r"^kernel=flex has no backward on a CPU; train with sdpa or eager$"
    ):
        decoder(random_tokens(decoder.config, 1, 4))


@torch.no_grad()
def test_compiled_flex_has_no_sinks_on_a_cpu() -> None:
    decoder = one_layer("flex", sinks=True)
    with pytest.raises(
        WorkhorseError, match=r"^kernel=flex cannot compute sinks on a CPU; use kernel=eager$"
    ):
        decoder(random_tokens(decoder.config, 1, 4))


def test_flex_does_not_decode() -> None:
    """It would be compiled again for every length."""
    with pytest.raises(
        WorkhorseError,
        match=r"^kernel=flex is compiled for one length and cannot decode; use kernel=sdpa or "
        r"eager$",
    ):
        one_layer("flex").new_cache(1, 8)


def test_an_unknown_kernel() -> None:
    with pytest.raises(
        WorkhorseError, match=r"^kernel='flash' is unknown; choose auto, eager, sdpa"
    ):
        COVERING[0].build("flash")  # type: ignore[arg-type]


@pytest.mark.cuda
def test_flex_refuses_heads_too_narrow_for_a_gpu() -> None:
    kernel = make_kernel("flex", AttentionPattern(), Scoring(scale=1.0), 1)
    q, k, v = torch.randn(3, 1, 1, 4, 8, device="cuda")
    with pytest.raises(
        WorkhorseError, match="on a GPU needs head_dim >= 16, not 8; use kernel=sdpa"
    ):
        kernel(q, k, v, (None, None))
