"""GGUF: the single-file format of llama.cpp and the programs built on it."""

from workhorse.checkpoints.gguf.lora import write_gguf_adapter
from workhorse.checkpoints.gguf.read import GgufFile
from workhorse.checkpoints.gguf.write import GgufType, find_gguf_family, gguf_types, write_gguf

__all__ = [
    "GgufFile",
    "GgufType",
    "find_gguf_family",
    "gguf_types",
    "write_gguf",
    "write_gguf_adapter",
]
