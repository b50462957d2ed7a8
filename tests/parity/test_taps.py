"""Hook outputs of the reference, compared with hidden states and attentions of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import reference
from tests.parity.all_cases import ALL
from tests.parity.test_families import BOUND
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.execute.choose import decoding_body

WITHOUT_SINK = ("granite_swa", "granitemoe_swa")
"""Types whose attention weights transformers returns before it applies the sink."""


@pytest.mark.parametrize("model_type", ALL)
@torch.no_grad()
def test_hidden_states_and_attentions(model_type: str, tmp_path: Path) -> None:
    pair = reference.make(model_type, ALL[model_type][0], tmp_path)
    ours = HuggingFaceDirectory(tmp_path).load_decoder(kernel="eager", dtype=torch.float32)
    decoding_body(ours)  # must not change the reference
    seen: dict[str, Tensor] = {}
    for path, module in ours.named_modules():
        module.register_forward_hook(
            lambda _module, _inputs, output, path=path: seen.update({path: output})
        )
    ours(pair.tokens)
    theirs: Any = pair.theirs(
        pair.tokens, output_hidden_states=True, output_attentions=True, use_cache=False
    )
    layers = [f"layers.{n}" for n in range(len(ours.layers))]
    streams = [seen[path] for path in ("embedding", *layers[:-1], "final_norm")]
    weights = [seen[f"{layer}.attention.kernel.weights"] for layer in layers]
    if model_type in WITHOUT_SINK:
        weights = [each / each.sum(-1, keepdim=True) for each in weights]
    expected = (*theirs.hidden_states, *theirs.attentions)
    for found, their in zip((*streams, *weights), expected, strict=True):
        assert reference.relative(found, their) <= BOUND
