"""Short convolutions: their formula, and the start of a sequence."""

import pytest
import torch

from workhorse.config.base import ConfigError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.convolution import ShortConvolution
from workhorse.optim.groups import parameters_by_role


def decoder(**convolution: object) -> Decoder:
    block = {
        "kind": "pre_norm",
        "norm": "rms_norm",
        "attention": {"n_heads": 2, "position": "rope"},
        "feed_forward": {"kind": "mlp", "d_ff": 16},
        "convolution": convolution,
    }
    sizes = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "max_seq_len": 16}
    return DecoderConfig.from_dict({**sizes, "blocks": {"main": block}}).build()


def test_it_adds_the_last_few_inputs_feature_by_feature() -> None:
    convolution = ShortConvolution(2, width=3)
    convolution.weight.data = torch.tensor([[0.5, 0.0], [10.0, 0.0], [100.0, 1.0]])
    x = torch.tensor([[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]])
    assert convolution(x).tolist() == [[[1.5, 1.0], [13.0, 2.0], [124.5, 4.0]]]


def test_it_starts_as_the_identity() -> None:
    x = torch.randn(2, 5, 8)
    assert torch.equal(decoder().get_submodule("layers.0.feed_forward_convolution")(x), x)


def test_its_weights_take_steps_of_vectors_and_never_decay() -> None:
    roles = parameters_by_role(decoder(before=["feed_forward"]))
    names = [name for name in roles["vector"] if "convolution" in name]
    assert names == [f"layers.{layer}.feed_forward_convolution.weight" for layer in range(2)]
    assert not any("convolution" in name for role in ("hidden", "head") for name in roles[role])


def test_a_sub_layer_named_twice_and_a_width_that_no_text_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="width: 1000000 is too large"):
        decoder(width=1_000_000)
    with pytest.raises(ConfigError, match="names a sub-layer twice; remove one"):
        decoder(before=["attention", "attention"])
