"""Traces, attributions and attribution graphs of every shape of every model type.

    make campaign-traces

The default suite checks the first shape of each type (`tests/parity/test_taps.py`).
"""

from pathlib import Path

import pytest
import torch

from tests.parity import reference
from tests.parity.all_cases import ALL
from workhorse.inspect import Tracer, attribute, attribution_graph

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("model_type", ALL)
def test_every_shape(model_type: str, tmp_path: Path) -> None:
    for number, options in enumerate(ALL[model_type]):
        pair = reference.make(model_type, options, tmp_path / str(number))
        tracer = Tracer(pair.ours)
        run = tracer(pair.tokens)
        torch.testing.assert_close(run.logits, pair.ours(pair.tokens), atol=1e-4, rtol=0)
        patched = tracer(pair.tokens, edits={name: value.clone() for name, value in run.items()})
        assert all(torch.equal(patched[name], run[name]) for name in run)

        tokens = pair.tokens[:1, :12]
        logits = tracer(tokens).logits[0, -1]
        for parts in ("sublayers", "heads", "neurons"):
            found = attribute(pair.ours, tokens, 5, parts=parts)
            assert found.total == pytest.approx(found.logit, abs=1e-9)
            assert found.logit == pytest.approx(float(logits[5]), abs=1e-5)

        graph = attribution_graph(pair.ours, tokens, n_features=16)
        sums = graph.edges.sum(1) + graph.constants
        sums = torch.cat([sums[: len(graph.features)], sums[-len(graph.logits) :]])
        torch.testing.assert_close(sums, graph.values, atol=1e-9, rtol=0)
