"""The planned memory of serving equals the memory of a loaded model."""

import pytest
import torch

from tests.plan.families import LATENT, small
from workhorse.devices.tape import CPU
from workhorse.models.describe import SCORES, forward_flops
from workhorse.plan.limits import WAYS, allocated, bytes_of_weights, serving
from workhorse.transforms.quantization import FormatName, place_codes

MODELS = {
    "tied": small("llama", tie_word_embeddings=True),
    "windows": small("gemma3_text", sliding_window=5, num_hidden_layers=8),
    "mixture": small("mixtral", num_local_experts=4),
    "latent": small("deepseek_v3", num_hidden_layers=4, **LATENT),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", WAYS.values())
def test_weights_are_the_bytes_allocated(name: str, format: FormatName | None) -> None:
    decoder = MODELS[name].build(dtype=torch.bfloat16)
    if format is not None:
        place_codes(decoder, format)
    assert bytes_of_weights(MODELS[name], CPU, format)[0] == allocated(decoder)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_for_a_token_is_what_multiplies(name: str) -> None:
    config = MODELS[name]
    flops = forward_flops(config.build(device="meta"), 8)
    numbers = (sum(flops.values()) - flops[SCORES]) // 2
    weights, read = bytes_of_weights(config, CPU, None)
    assert read == 2 * numbers
    assert read < weights
    assert bytes_of_weights(config, CPU, "int8")[1] < 0.7 * read


def test_narrow_layers_have_no_codes() -> None:
    narrow = small("llama", hidden_size=16, head_dim=4, intermediate_size=24)
    found = serving(narrow, CPU, context=8, room=2**30, bandwidth=None)
    assert found["int4"] is None
    assert found["bfloat16"]["texts"] > 0


def test_a_gpu_has_no_operator_for_experts_in_codes() -> None:
    cuda = torch.device("cuda")  # no CUDA device is needed
    experts = 3 * 4 * 3 * 64 * 160  # layers, experts, matrices, rows, columns
    assert bytes_of_weights(MODELS["mixture"], cuda, "int4")[0] > 2 * experts
