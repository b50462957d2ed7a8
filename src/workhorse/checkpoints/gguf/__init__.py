"""GGUF: one file that llama.cpp and the programs built on it load."""

from workhorse.checkpoints.gguf.write import GgufType, gguf_types, write_gguf

__all__ = ["GgufType", "gguf_types", "write_gguf"]
