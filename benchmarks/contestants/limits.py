"""Limits of the machine for a case: the rate of its matmuls, or of reading memory."""

from benchmarks.harness.contest import Limit
from benchmarks.harness.shapes import BITS, DTYPES, PROMPT_TOKENS, Shape
from benchmarks.harness.worker import Contestant


def training_products(shape: Shape, dtype: str, device: str) -> Limit:
    """The matmuls of a training step, including both gradients."""
    tokens = shape.batch * shape.context
    products = _products(shape.products, tokens, dtype, device, backward=True)
    return _of_products(products, shape.training_flops)


def prompt_products(shape: Shape, precision: str, batch: int, device: str) -> Limit:
    """The matmuls of a prompt, except the head's; in bfloat16 for weights of 8 or 4 bits."""
    dtype = precision if precision in DTYPES else "bfloat16"
    tokens = batch * PROMPT_TOKENS
    products = _products(shape.products[:-1], tokens, dtype, device, backward=False)
    return _of_products(products, shape.forward_flops)


def memory(device: str) -> Contestant:
    """The contestant that reads memory."""
    return Contestant("memory read", "benchmarks.harness.limits:memory", {"device": device})


def weights_read(shape: Shape, precision: str, batch: int, device: str) -> Limit:
    """Reading memory: every step reads all weights of the matmuls once, for any batch size."""
    work = shape.product_weights * BITS[precision] / 8 / batch / 1e9
    return Limit("memory read", "GB/s", memory(device), measure="gbytes", work=work)


def _products(
    shapes: list[tuple[int, int, int]], tokens: int, dtype: str, device: str, *, backward: bool
) -> Contestant:
    arguments = {
        "shapes": shapes,
        "tokens": tokens,
        "dtype": dtype,
        "device": device,
        "backward": backward,
    }
    return Contestant("matrix products", "benchmarks.harness.limits:products", arguments)


def _of_products(products: Contestant, flops: float) -> Limit:
    return Limit("matrix products", "GFLOP/s", products, measure="gflops", work=flops / 1e9)
