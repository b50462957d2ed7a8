"""Log-probabilities in a compiled program: two passes over the logits and no float32 copy of them.

With the plain function a GPU reads and writes logits a dozen times, most of them in float32.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from workhorse.nn.logprobs import HeadLoss, Shaping, TokenLogprobs, score
from workhorse.transforms.replace import become, combined, replace_modules


def compile_logprobs(objective: nn.Module) -> None:
    """Compile those of an objective, in place; native ones and those of divided layers stay."""

    def choose(module: nn.Module) -> nn.Module:
        if type(module) not in (HeadLoss, TokenLogprobs):
            return module
        return become(module, combined("Compiled", CompiledLogprobs, type(module)))

    replace_modules(objective, choose)


class CompiledLogprobs(TokenLogprobs):
    """`TokenLogprobs` whose terms and gradient are one compiled function of the logits."""

    def score(
        self, logits: Tensor, targets: Tensor, coefficients: Tensor | None, shaping: Shaping
    ) -> Tensor:
        for rows in (logits, targets, coefficients):  # the last part has fewer
            if rows is not None:  # one row has its own program
                torch._dynamo.maybe_mark_dynamic(rows, 0)
        return _compiled()(logits, targets, coefficients, shaping=shaping, entropy=self.entropy)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(score)
