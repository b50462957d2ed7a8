"""The model type `workhorse` of the command `lm_eval`; `workhorse_lm_eval` tells it where."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lm_eval.models  # noqa: F401 (a list with an entry, ours, would pass for complete)
import torch
from lm_eval.api.registry import register_model
from tqdm import tqdm

from workhorse.errors import WorkhorseError
from workhorse.evaluate.harness_model import HarnessModel
from workhorse.load_model import load
from workhorse.nn.kernels import KernelName

UNASKED = "cuda:0"
"""The device that the harness names when its user names none."""


@register_model("workhorse")
class WorkhorseLM(HarnessModel):
    """`lm_eval --model workhorse --model_args pretrained=MODEL,dtype=bfloat16`.

    Args:
        pretrained: what `workhorse.load` takes.
        device: a PyTorch device; `cuda:0`, as the harness says by itself, is `auto` where there is
            no CUDA.
        dtype: a PyTorch floating-point type.
        kernel: how attention is computed.
        batch_size: texts in a forward pass; `auto` for as many as suit the device.
        max_batch_size: the harness's bound for `auto`, which needs none here.
        max_length: tokens read of a text at most; the model's context if left out.

    Raises:
        WorkhorseError: as `load` and `HarnessModel`; or another `batch_size`.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kernel: KernelName = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        del max_batch_size
        if device == UNASKED and not torch.cuda.is_available():
            device = "auto"
        tell = logging.getLogger("lm_eval").warning
        super().__init__(
            load(pretrained, device=device, dtype=dtype, kernel=kernel, tell=tell),
            progress=_bar,
            batch_size=_batch_size(batch_size),
            max_length=max_length,
        )


def _batch_size(given: int | str) -> int | None:
    text = str(given)
    if text.partition(":")[0] == "auto":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise WorkhorseError(f"batch_size={given} is no number of texts; choose 1 or more, or auto")
    return int(text)


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Progress as the harness shows it elsewhere."""
    with tqdm(desc=label, unit="requests") as bar:

        def report(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
