"""Memory-mapped weights: same values, no memory of their own, and the file stays unchanged."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import workhorse
from workhorse.checkpoints import mapped_weights, weights_of
from workhorse.checkpoints.huggingface.export import write_huggingface
from workhorse.checkpoints.stored import open_stored
from workhorse.errors import WorkhorseError
from workhorse.models.families.gpt2 import gpt2
from workhorse.models.families.llama import llama
from workhorse.nn import DecoderConfig

SIZES = {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "max_seq_len": 32}
RENAMED = llama(**SIZES, d_ff=96)
TURNED_AND_PARTED = gpt2(**SIZES)


def written(folder: Path, config: DecoderConfig) -> Path:
    torch.manual_seed(1)
    write_huggingface(folder / "model", config.build(dtype=torch.bfloat16))
    return folder / "model"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [RENAMED, TURNED_AND_PARTED], ids=["llama", "gpt2"])
def test_weights_are_those_of_a_copy(
    tmp_path: Path, config: DecoderConfig, dtype: torch.dtype
) -> None:
    stored = open_stored(written(tmp_path, config))
    copied = weights_of(stored.load_decoder(dtype=dtype))
    mapped = weights_of(stored.load_decoder(dtype=dtype, places=mapped_weights))
    assert mapped.keys() == copied.keys()
    for name, weight in copied.items():
        assert mapped[name].dtype == dtype
        assert torch.equal(mapped[name], weight), name


def test_what_is_written_to_a_weight_does_not_reach_the_file(tmp_path: Path) -> None:
    folder = written(tmp_path, RENAMED)
    file = folder / "model.safetensors"
    before = hashlib.sha256(file.read_bytes()).digest()
    changed = workhorse.load(folder, dtype="bfloat16", notify=lambda _: None).decoder
    with torch.no_grad():
        for weight in changed.parameters():
            weight.zero_()
    assert hashlib.sha256(file.read_bytes()).digest() == before
    again = workhorse.load(folder, dtype="bfloat16", notify=lambda _: None).decoder
    assert all(bool(weight.any()) for weight in again.parameters())


IMPORTS = """
import sys, workhorse
workhorse.load(sys.argv[1], notify=lambda _: None)
print("torch._dynamo" in sys.modules)
"""


def test_loading_imports_no_compiler(tmp_path: Path) -> None:
    """`torch.cat` on the meta device would import the compiler, which takes 1.5 seconds."""
    command = [sys.executable, "-c", IMPORTS, str(written(tmp_path, TURNED_AND_PARTED))]
    assert subprocess.check_output(command, text=True).strip() == "False"


OWN_MEMORY = """
import sys, workhorse
from pathlib import Path
def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
def load():
    decoder = workhorse.load(sys.argv[1], dtype=sys.argv[2], notify=lambda _: None).decoder
    assert all(weight.view(-1)[::1024].any() for weight in decoder.parameters())
    return decoder
load()  # imports everything before memory is measured
before, decoder = own(), load()
print((own() - before) / sum(weight.nbytes for weight in decoder.parameters()))
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux reports anonymous memory separately"
)
def test_a_model_of_a_file_in_its_type_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """The model has 17 million weights. If its dtype is not the file's, they are copied."""
    folder = written(tmp_path, llama(**SIZES | {"d_model": 1024, "n_layers": 2}, d_ff=1024))
    command = [sys.executable, "-c", OWN_MEMORY, str(folder)]
    assert float(subprocess.check_output([*command, "bfloat16"], text=True)) < 0.2
    assert float(subprocess.check_output([*command, "float32"], text=True)) > 0.8


@pytest.mark.parametrize("target", ["model.safetensors", "nothing"])
def test_weights_that_are_a_link_to_nothing_are_one_line(tmp_path: Path, target: str) -> None:
    folder = written(tmp_path, RENAMED)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    with pytest.raises(WorkhorseError, match=r"model\.safetensors"):
        workhorse.load(folder, notify=lambda _: None)
