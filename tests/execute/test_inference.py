import pytest
import torch

from tests.native.machine import needs
from tests.nn.grid import CAUSAL
from workhorse.execute.inference import prepare_for_inference
from workhorse.execute.native_decoding.attention import DecodingSdpa
from workhorse.execute.native_decoding.stream import StreamedLinear


@needs("decoding")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_decoder_on_the_cpu_gets_the_operators_of_one(device: str) -> None:
    with torch.device(device):
        decoder = CAUSAL[0].build(kernel="sdpa").eval()
    prepare_for_inference(decoder)
    ours = [part for part in decoder.modules() if isinstance(part, StreamedLinear | DecodingSdpa)]
    assert bool(ours) is (device == "cpu")
