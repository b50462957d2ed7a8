"""Loading, training and generating do not change global state of the process."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ctypes, os, signal, sys
from pathlib import Path
import torch
import torch.nn.functional as F

try:  # c10::GetCPUAllocator()
    library = ctypes.CDLL(Path(torch.__file__).parent / "lib/libc10.so")
    allocator = library._ZN3c1015GetCPUAllocatorEv
    allocator.restype = ctypes.c_void_p
except (OSError, AttributeError):  # not on Linux
    allocator = lambda: None

def state():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return {
        "environment": dict(os.environ),
        "functions": {name: id(getattr(F, name)) for name in dir(F)},
        "handlers": [signal.getsignal(number) for number in numbers],
        "allocator": allocator(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }

before = state()
import workhorse
from workhorse.run import train
from workhorse.train import Recipe

seen = []
recipe = Recipe.from_dict({
    "name": "tiny",
    "model": {"preset": "gpt2", "d_model": 48, "n_layers": 2, "max_seq_len": 32},
    "tokenizer": {"kind": "bytes"},
    "data": {"corpus": {"kind": "folder", "path": sys.argv[1]}},
    "train": {"steps": 4, "batch_size": 4, "seq_len": 16, "checkpoint_every": 2},
})
train(recipe, sys.argv[2], on_event=lambda event: seen.append(state()))
model = workhorse.load(sys.argv[2])
for delta in model.stream("text", max_new_tokens=4):
    seen.append(state())
model.generate("text", max_new_tokens=4)
for now in [*seen, state()]:
    changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
    assert not changed, changed
print(len(seen))
"""


def test_the_library_changes_nothing_of_its_process(tmp_path: Path) -> None:
    corpus = tmp_path / "texts"
    corpus.mkdir()
    for name in "abc":
        (corpus / f"{name}.txt").write_text(f"text {name} and more of it. " * 40)
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(corpus), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout.split()[-1]) > 6
