"""Attribution graphs: their edges are complete. All shapes of all types: a campaign."""

from dataclasses import replace

import pytest
import torch

from tests.inspect.test_trace import SMALL
from tests.parity import reference
from tests.parity.all_cases import ALL
from workhorse.errors import WorkhorseError
from workhorse.inspect import attribution_graph
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, train_tokenizer


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2", "deepseek_v3", "olmo2", "mpt"])
def test_the_edges_into_a_node_sum_to_its_value(model_type: str, tmp_path) -> None:
    pair = reference.make(model_type, ALL[model_type][0], tmp_path)
    tokens = pair.tokens[:1, :7]
    graph = attribution_graph(pair.ours, tokens, n_features=12)
    shown = len(graph.logits)
    sums = graph.edges.sum(1) + graph.constants
    sums = torch.cat([sums[: len(graph.features)], sums[-shown:]])
    torch.testing.assert_close(sums, graph.values, atol=1e-9, rtol=0)
    logits = pair.ours(tokens)[0, -1]
    expected = (logits[graph.logits] - logits.mean()).double()
    torch.testing.assert_close(graph.values[-shown:], expected, atol=1e-5, rtol=0)
    influence = graph.influence()
    assert influence[-shown:].sum() == 0  # nothing comes after a logit

    data = graph.to_dict(name=model_type, node_threshold=1, edge_threshold=1)
    ids = [node["node_id"] for node in data["nodes"]]
    assert len(set(ids)) == len(ids)
    assert {end for link in data["links"] for end in (link["source"], link["target"])} <= {*ids}
    strongest = max(data["links"], key=lambda link: abs(link["weight"]))
    assert abs(strongest["weight"]) == pytest.approx(graph.edges.abs().max().item())


def test_tokens_of_a_graph_have_names() -> None:
    """Also rows of a padded embedding, and special tokens."""
    tokenizer = train_tokenizer(BytesConfig(special=SpecialTokensConfig()), [])
    decoder = SMALL.replace(vocab_size=tokenizer.vocab_size + 5).build()
    graph = attribution_graph(decoder, [97, 9, tokenizer.eos_id], n_features=0, n_logits=1)
    graph = replace(graph, logits=torch.tensor([tokenizer.vocab_size + 4]))
    data = graph.to_dict(tokenizer)
    assert data["metadata"]["prompt_tokens"] == ["a", "→", tokenizer.roles["eos"]]
    (logit,) = (node for node in data["nodes"] if node["feature_type"] == "logit")
    assert f"#{tokenizer.vocab_size + 4}" in logit["clerp"]


def test_limits_of_a_graph(tmp_path) -> None:
    pair = reference.make("gpt2", ALL["gpt2"][0], tmp_path)
    with pytest.raises(WorkhorseError, match="3 sequences have no common graph"):
        attribution_graph(pair.ours, pair.tokens)
    alone = attribution_graph(pair.ours, pair.tokens[0, :1], n_features=0, n_logits=10**6)
    assert alone.features.shape == (0, 3)
    with pytest.raises(WorkhorseError, match=r"threshold=1\.5 is not a share"):
        alone.to_dict(edge_threshold=1.5)
    with pytest.raises(WorkhorseError, match="n_logits=0 is out of range"):
        attribution_graph(pair.ours, [1], n_logits=0)
    pair.ours.get_parameter("final_norm.weight").data[0] = torch.nan
    with pytest.raises(WorkhorseError, match="a logit is infinite or NaN"):
        attribution_graph(pair.ours, [1])
