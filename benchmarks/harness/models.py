"""Models for decoding benchmarks: random weights of a shape, made once and stored."""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.shapes import DECODING, STORED, Shape

SHAPES = DECODING | STORED
if TYPE_CHECKING:
    from workhorse.nn import DecoderConfig

GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16"}


def huggingface_folder(shape: str, root: str) -> Path:
    """A Hugging Face directory in bfloat16; a separate process makes it if it does not exist."""
    path = Path(root) / f"{shape}-bfloat16"
    if not path.exists():
        _make(shape, "huggingface", root)
    return path


def gguf_file(shape: str, precision: str, root: str) -> Path:
    """A GGUF file of the same weights; a separate process makes it if it does not exist."""
    path = Path(root) / f"{shape}-{precision}.gguf"
    if not path.exists():
        _make(shape, precision, root)
    return path


def _make(shape: str, kind: str, root: str) -> None:
    command = [sys.executable, "-m", "benchmarks.harness.models", shape, kind, root]
    subprocess.run(command, check=True)


def _main(shape: str, kind: str, root: str) -> None:
    Path(root).mkdir(parents=True, exist_ok=True)
    if kind == "huggingface":
        _write_huggingface(SHAPES[shape], Path(root) / f"{shape}-bfloat16")
    elif kind in GGUF_TYPES:
        _write_gguf(huggingface_folder(shape, root), kind, Path(root) / f"{shape}-{kind}.gguf")
    else:
        _quantize(gguf_file(shape, "bfloat16", root), kind, Path(root) / f"{shape}-{kind}.gguf")


def _write_huggingface(shape: Shape, path: Path) -> None:
    import torch

    from workhorse.checkpoints.huggingface.export import write_huggingface

    torch.manual_seed(0)
    write_huggingface(path, _config(shape).build(dtype=torch.bfloat16))


def _config(shape: Shape) -> "DecoderConfig":
    from workhorse.models.families.gpt2 import gpt2
    from workhorse.models.families.llama import llama

    sizes = {
        "d_model": shape.d_model,
        "n_layers": shape.n_layers,
        "n_heads": shape.n_heads,
        "vocab_size": shape.vocab_size,
        "max_seq_len": shape.context,
    }
    if not shape.gated:
        return gpt2(**sizes)
    return llama(**sizes, n_kv_heads=shape.n_kv_heads, d_ff=shape.d_ff)


def _write_gguf(folder: Path, precision: str, path: Path) -> None:
    import workhorse
    from workhorse.checkpoints.gguf import write_gguf

    decoder = workhorse.load(folder, dtype=precision, notify=lambda _line: None).decoder
    write_gguf(path, decoder, model_type="llama", dtype=GGUF_TYPES[precision])  # pyright: ignore


def _quantize(source: Path, kind: str, path: Path) -> None:
    """Quantise every matrix to one type: mixed types would make the bits per weight unequal."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    how.pure = True
    temporary = path.with_suffix(".tmp")
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(temporary).encode(), ctypes.pointer(how)
    )
    if failed:
        raise RuntimeError(f"llama.cpp could not quantise {source} to {kind}")
    temporary.rename(path)


if __name__ == "__main__":
    _main(*sys.argv[1:])
