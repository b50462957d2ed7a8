"""Traces of every model type: compared with transformers, patched with themselves, attributed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import reference
from tests.parity.all_cases import ALL
from tests.parity.test_families import BOUND
from workhorse.execute.choose import decoding_backend
from workhorse.inspect import Tracer, attribute

WITHOUT_SINK = ("granite_swa", "granitemoe_swa")
"""Types whose attention weights transformers returns before it applies the sink."""


@pytest.mark.parametrize("model_type", ALL)
def test_traces(model_type: str, tmp_path: Path) -> None:
    pair = reference.make(model_type, ALL[model_type][0], tmp_path)
    decoding_backend(pair.ours)  # must not change the reference
    tracer = Tracer(pair.ours)
    run = tracer(pair.tokens)
    with torch.no_grad():
        theirs: Any = pair.theirs(
            pair.tokens, output_hidden_states=True, output_attentions=True, use_cache=False
        )
    layers = [f"layers.{n}" for n in range(len(pair.ours.layers))]
    streams = [run[path] for path in ("embedding", *layers[:-1], "final_norm")]
    weights = [run[f"{layer}.attention.kernel.weights"] for layer in layers]
    if model_type in WITHOUT_SINK:
        weights = [each / each.sum(-1, keepdim=True) for each in weights]
    expected = (*theirs.hidden_states, *theirs.attentions)
    for found, their in zip((*streams, *weights), expected, strict=True):
        assert reference.relative(found, their) <= BOUND

    patched = tracer(pair.tokens, edits={name: tensor.clone() for name, tensor in run.items()})
    assert list(patched) == list(run)
    assert all(torch.equal(patched[name], run[name]) for name in run)

    for parts in ("sublayers", "heads", "neurons"):
        found = attribute(pair.ours, pair.tokens[0], (5, 9), parts=parts)
        logits = run.logits[0, -1]
        assert found.total == pytest.approx(found.logit, abs=1e-9)
        assert found.logit == pytest.approx(float(logits[5] - logits[9]), abs=1e-5)
