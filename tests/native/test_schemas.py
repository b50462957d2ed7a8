"""The registered schema of each operator is correct: its shapes, and the arguments it changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.native.machine import DECODING, OPERATORS
from workhorse.execute.lower.step import translate
from workhorse.execute.native_decoding.layers import attend_natively, stream_weights
from workhorse.execute.native_decoding.native_step import Angles
from workhorse.execute.native_training.feedforward import activation_of
from workhorse.nn import DecoderConfig
from workhorse.transforms.quantization import QuantizedLinear

Arguments = tuple[Any, ...]


def randn(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(shape).to(dtype)


def heads(dtype: torch.dtype) -> Tensor:
    """(batch, heads, seq, head_dim) in the memory order of the projections around attention."""
    return torch.randn(2, 6, 3, 8).to(dtype).transpose(1, 2)


def attention_backward(dtype: torch.dtype) -> Arguments:
    return (*(heads(dtype) for _ in range(5)), torch.randn(2, 3, 6), 0.3, True, torch.rand(3))


def packed(ends: list[int] | None) -> Callable[[torch.dtype], Arguments]:
    def arguments(dtype: torch.dtype) -> Arguments:
        plain = nn.Linear(64, 20)
        layer = QuantizedLinear.of(plain, "int4")
        if ends is not None:
            codes, scales = (torch.stack([x, x]) for x in (layer.codes, layer.scales))
            rows = torch.tensor(ends, dtype=torch.int32)
            return torch.randn(5, 64).to(dtype), codes, scales, layer.table, None, rows, 20
        x = torch.randn(2, 3, 64).to(dtype)
        return x, layer.codes, layer.scales, layer.table, plain.bias.detach().to(dtype), None, 20

    return arguments


def activation(gated: bool, backward: bool) -> Callable[[torch.dtype], Arguments]:
    act = activation_of(nn.SiLU())
    assert act is not None
    x, up = randn(3, 17), randn(3, 17)

    def arguments(dtype: torch.dtype) -> Arguments:
        above = (x(dtype),) if backward else ()
        return *above, x(dtype), up(dtype) if gated else None, act.table, act.name

    return arguments


def adamw(dtype: torch.dtype) -> Arguments:
    """Arguments for split weights, or for float32."""
    low_bits = [torch.zeros(5, dtype=torch.int16)] if dtype == torch.bfloat16 else []
    x = randn(5)
    squares = torch.rand(5)
    numbers = (1.0, 1e-3, 0.9, 0.95, 1e-8, 0.1)
    return [x(dtype)], low_bits, [x(dtype)], [x(dtype)], [squares], [torch.ones(())], *numbers


def decode_step(dtype: torch.dtype) -> Arguments:
    """Two sequences with 3 and 17 cached tokens, and one and three new tokens."""
    attention = {"n_heads": 2, "n_kv_heads": 1, "position": {"kind": "rope"}}
    block = {
        "kind": "pre_norm",
        "norm": {"kind": "rms_norm"},
        "attention": attention,
        "feed_forward": {"kind": "gated_mlp", "d_ff": 12},
    }
    sizes = {"vocab_size": 11, "d_model": 16, "n_layers": 1, "max_seq_len": 40}
    decoder = (
        DecoderConfig.from_dict({**sizes, "blocks": {"main": block}}).build(dtype=dtype).eval()
    )
    stream_weights(decoder, OPERATORS)
    attend_natively(decoder, DECODING)
    program = translate(decoder)
    weights = torch.ops.workhorse.keep_weights.default(list(program.weights))
    code = program.instructions, program.numbers, program.registers, weights
    angles = Angles().upto(19, program.rotations)
    tokens, counts = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 3])
    lengths, wanted = torch.tensor([3, 17]), torch.tensor([0, 2, 3])
    cache = (
        [torch.tensor([[4, 0], [2, 3]])],
        [randn(1, 5, 16, 8)(dtype)],
        [randn(1, 5, 16, 8)(dtype)],
    )
    return *code, angles, tokens, counts, lengths, *cache, program.reaches, 3, wanted, 11


def feed(dtype: torch.dtype) -> Arguments:
    act = activation_of(nn.SiLU())
    assert act is not None
    x, output, first, down = (randn(*shape)(dtype) for shape in ((3, 8), (8, 6), (5, 8), (8, 5)))
    norm = (randn(8)(dtype), None, 0.0, 1e-6, True, False)
    attended = randn(3, 6)(dtype)
    firsts = [first, first + 1], [None, randn(5)(dtype)]
    return x, attended, output, None, *norm, *firsts, down, None, act.table, act.name, True


def feed_backward(dtype: torch.dtype) -> Arguments:
    act = activation_of(nn.SiLU())
    assert act is not None
    x, output, first, down = (randn(*shape)(dtype) for shape in ((3, 8), (8, 6), (5, 8), (8, 5)))
    norm = (torch.ones(3, 2), randn(8)(dtype), 0.0, True)
    hidden = [randn(3, 5)(dtype), randn(3, 5)(dtype)]
    matrices = output, [first, first + 1], hidden, down
    return x, x + 1, *norm, *matrices, act.table, act.name, True


CASES: dict[str, tuple[str, str, Callable[[torch.dtype], Arguments]]] = {
    "linear": ("decoding", "linear", lambda d: (randn(2, 8)(d), randn(5, 8)(d), randn(5)(d))),
    "linear_each": (
        "decoding",
        "linear_each",
        lambda d: (randn(2, 8)(d), [randn(5, 8)(d), randn(3, 8)(d)], [None, randn(3)(d)]),
    ),
    "attend": (
        "decoding",
        "attend",
        lambda d: (
            randn(2, 4, 3, 8)(d),
            randn(2, 5, 16, 8)(d),
            randn(2, 5, 16, 12)(d),
            torch.tensor([[4, 1], [2, 3]]),
            torch.tensor([[0, 0, 0], [7, 8, 9]]),
            torch.tensor([[4, 5, 6], [18, 19, 20]]),
            0.3,
            torch.rand(4),
        ),
    ),
    "decode_step": ("steps", "decode_step", decode_step),
    "argmax": ("decoding", "argmax", lambda d: (randn(3, 40)(d),)),
    "packed_linear": ("decoding", "packed_linear", packed(None)),
    "packed_linear of experts": ("decoding", "packed_linear", packed([2, 5])),
    "gemm": ("matrix_unit", "gemm", lambda d: (randn(3, 8)(d), randn(8, 5)(d), randn(5)(d))),
    "product": (
        "vectors",
        "product",
        lambda d: (randn(3, 8)(d), randn(8, 5)(d), randn(5)(d)),
    ),
    "products": (
        "vectors",
        "products",
        lambda d: (
            [randn(3, 8)(d), randn(3, 4)(d), randn(2, 4)(d)],
            [randn(8, 5)(d), randn(4, 5)(d), randn(4, 6)(d)],
            [0, 0, 1],
            [randn(5)(d), None],
        ),
    ),
    "norm_project": (
        "vectors",
        "norm_project",
        lambda d: (
            *(randn(3, 8)(d), randn(3, 8)(d), randn(8)(d), None, 0.0, 1e-6, True, False),
            [randn(5, 8)(d), randn(7, 8)(d)],
            [None, randn(7)(d)],
        ),
    ),
    "norm_project_backward": (
        "vectors",
        "norm_project_backward",
        lambda d: (
            [randn(3, 5)(d), randn(3, 7)(d)],
            [randn(5, 8)(d), randn(7, 8)(d)],
            *(randn(3, 8)(d), torch.ones(3, 2), randn(8)(d), randn(3, 8)(d), randn(3, 8)(d)),
            *(0.0, True),
        ),
    ),
    "feed": ("vectors", "feed", feed),
    "feed_backward": ("vectors", "feed_backward", feed_backward),
    "attention": (
        "training",
        "attention",
        lambda d: (heads(d), heads(d), heads(d), 0.3, True, torch.rand(3)),
    ),
    "attention_backward": ("training", "attention_backward", attention_backward),
    "activation": ("training", "activation", activation(gated=False, backward=False)),
    "gated": ("training", "activation", activation(gated=True, backward=False)),
    "activation_backward": (
        "training",
        "activation_backward",
        activation(gated=False, backward=True),
    ),
    "gated backwards": ("training", "activation_backward", activation(gated=True, backward=True)),
    "norm": (
        "training",
        "norm",
        lambda d: (randn(2, 3, 8)(d), randn(8)(d), None, 0.0, 1e-6, False, True),
    ),
    "add_norm": (
        "training",
        "add_norm",
        lambda d: (
            randn(3, 8)(d),
            randn(3, 8)(d),
            randn(8)(d),
            randn(8)(d),
            0.0,
            1e-6,
            True,
            False,
        ),
    ),
    "norm_backward": (
        "training",
        "norm_backward",
        lambda d: (
            randn(3, 8)(d),
            randn(3, 8)(d),
            torch.ones(3, 2),
            randn(8)(d),
            randn(3, 8)(d),
            0.0,
            True,
        ),
    ),
    "score_": (
        "training",
        "score_",
        lambda d: (randn(3, 11)(d), torch.tensor([1, -100, 10]), torch.randn(3, 4), 1.0, True),
    ),
    "sum_rows": (
        "training",
        "sum_rows",
        lambda d: (torch.tensor([2, 0, 2, 5]), randn(4, 3)(d), 7),
    ),
    "squared_length": ("training", "squared_length", lambda d: ([randn(3)(d), randn(2, 2)(d)],)),
    "adamw_": ("training", "adamw_", adamw),
    "muon_directions": (
        "training",
        "muon_directions",
        lambda d: ([randn(2, 6, 4)(d)], torch.randn(1, 2, 6, 4), 1.0, 0.95, True),
    ),
    "split_move_": (
        "training",
        "split_move_",
        lambda d: (
            [randn(6, 4)(torch.bfloat16)],
            [torch.zeros(6, 4, dtype=torch.int16)],
            randn(1, 4, 6)(torch.bfloat16),
            0.99,
            1e-2,
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_an_operator_is_what_its_schema_and_its_shapes_say(case: str, dtype: torch.dtype) -> None:
    library, name, arguments = CASES[case]
    if reason := OPERATORS.why_not.get(library):  # pyright: ignore[reportArgumentType, reportCallIssue]
        pytest.skip(reason)
    if name.startswith("attention") and dtype not in OPERATORS.training.attention_types:
        pytest.skip(f"this CPU leaves attention of {dtype} to PyTorch")
    operator = getattr(torch.ops.workhorse, name).default
    torch.library.opcheck(operator, arguments(dtype), test_utils=("test_schema", "test_faketensor"))


def test_every_operator_is_a_case() -> None:
    schemas = [schema.name for schema in torch._C._jit_get_all_schemas()]
    ours = {name.partition("::")[2] for name in schemas if name.startswith("workhorse::")}
    untraced = {"keep_weights", "drop_weights"}  # they compute nothing
    assert ours - untraced <= {name for _, name, _ in CASES.values()}
