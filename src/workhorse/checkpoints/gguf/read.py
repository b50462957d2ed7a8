"""Reads a model from a GGUF file: its config, weights and tokenizer.

Files of other programs can also be read, if Workhorse supports their architecture. The file is
memory-mapped, and tensors are read one at a time. Quantised weights become float32.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workhorse.checkpoints.gguf.architecture import Architecture
from workhorse.checkpoints.gguf.architectures import ARCHITECTURES
from workhorse.checkpoints.gguf.metadata import FACTORS, OWN_CONFIG, shortest
from workhorse.checkpoints.gguf.quantized import check_readable, dequantize
from workhorse.checkpoints.gguf.read_config import ConfigReader
from workhorse.checkpoints.gguf.tensors import EMBEDDING, HEAD, Part, tensor_parts
from workhorse.checkpoints.gguf.vocabulary import (
    end_tokens,
    has_vocabulary,
    read_vocabulary,
    vocabulary_remarks,
)
from workhorse.checkpoints.huggingface.tensor_folder import MappedFile, meta_decoder
from workhorse.checkpoints.tensors import Places, allocate, weights_of
from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.files.gguf_file import StoredTensor, read_gguf_header
from workhorse.files.safetensors import Stored
from workhorse.files.text_formats import open_contained
from workhorse.models.huggingface import Family
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

SUFFIX = ".gguf"
UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """A model in one GGUF file.

    Args:
        path: the file; its header is read immediately, its weights when they are needed.

    Attributes:
        kind: description of the format, for messages.
        config: the decoder's config.
        family: the equivalent Hugging Face model type, or None.
        remarks: warnings for the user, one line each.

    Raises:
        WorkhorseError: the file is not a complete GGUF file, or its architecture or the type of a
            tensor is not supported.
    """

    kind = "GGUF file"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with open_contained(self.path.parent, self.path.name) as file:
            self._header = read_gguf_header(file, self.path)
            self._mapped = MappedFile(file, self.path)
        try:
            self._architecture = _architecture(self._header.keys)
            reader = self._config_reader()
            self.config: DecoderConfig
            self.family: Family | None
            self.config, self.family = reader.config()
        except WorkhorseError as error:
            raise WorkhorseError(f"{self.path}: {error}") from None
        self.remarks: list[str] = vocabulary_remarks(self._header.keys)
        if reader.unread:
            self.remarks.append(f"unknown keys are ignored: {', '.join(reader.unread)}")

    @staticmethod
    def is_one(path: Path) -> bool:
        """Return True if a path looks like a GGUF file."""
        return path.is_file() and path.suffix == SUFFIX

    @property
    def tensors(self) -> Collection[StoredTensor]:
        """Location, shape and type of each tensor."""
        return self._header.tensors.values()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding; float32 if any tensor is quantised."""
        quantized = any(one.kind not in UNQUANTIZED for one in self.tensors)
        return torch.float32 if quantized else UNQUANTIZED[self._header.tensors[EMBEDDING].kind]

    def _config_reader(self) -> ConfigReader:
        start = f"{self._architecture.name}."
        keys = {
            key.removeprefix(start): _number(value)
            for key, value in self._header.keys.items()
            if key.startswith(start)
        }
        shapes = {name: tensor.shape for name, tensor in self._header.tensors.items()}
        ranks = {EMBEDDING: 2} | {name: 1 for name in FACTORS if name in shapes}
        for name, rank in ranks.items():
            if len(shapes.get(name, ())) != rank:
                raise WorkhorseError(
                    f"tensor {name!r} is missing or does not have {rank} axes; fetch the file again"
                )
        factors = {name: self._read(name).float() for name in FACTORS if name in shapes}
        if self._architecture.copied_head and HEAD in shapes and self._is_copied():
            del shapes[HEAD]
        own = self._header.keys.get(OWN_CONFIG)
        return ConfigReader(self._architecture, keys, shapes, factors, own)

    def _is_copied(self) -> bool:
        """True if the head is a copy of the embedding."""
        head, embedding = self._header.tensors[HEAD], self._header.tensors[EMBEDDING]
        if (head.kind, head.shape) != (embedding.kind, embedding.shape):
            return False
        return torch.equal(self._bytes(HEAD), self._bytes(EMBEDDING))

    def load_decoder(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        kernel: KernelName = "auto",
        places: Places = weights_of,
    ) -> Decoder:
        """Build the decoder and load its weights; see `StoredModel.load_decoder`.

        Raises:
            WorkhorseError: a tensor is missing, unexpected or has a wrong shape, or its type needs
                the package gguf.
        """
        tensors = self._header.tensors
        for kind in sorted({one.kind for one in self.tensors} - UNQUANTIZED.keys()):
            check_readable(kind)
        dtype = dtype or self.dtype
        decoder = meta_decoder(
            self.config, kernel, dtype, n_tensors=len(tensors), source=str(self.path)
        )
        parts = tensor_parts(self._architecture, decoder)
        self._account(parts)
        into = places(allocate(decoder, device))
        with torch.no_grad():
            for name, members in parts.items():
                rows = torch.split(self._read(name), [part.shape[0] for part in members])
                for part, values in zip(members, rows, strict=True):
                    into[part.ours].copy_(part.take(values))
        return decoder.eval()

    def _account(self, parts: Mapping[str, list[Part]]) -> None:
        """Check that every tensor of the file is used and every weight has a source."""
        tensors = self._header.tensors
        copied = self._architecture.copied_head and self.config.head.tied
        aside = {*FACTORS, HEAD} if copied else {*FACTORS}
        for name in sorted((tensors.keys() - aside) ^ parts.keys()):
            state = "is missing" if name in parts else "is not part of this model"
            raise WorkhorseError(f"{self.path}: tensor {shown(name)} {state}; fetch the file again")
        for name, members in parts.items():
            rows = sum(part.shape[0] for part in members)
            fits = (rows, *members[0].shape[1:])
            if tensors[name].shape != fits:
                raise WorkhorseError(
                    f"{self.path}: tensor {shown(name)} has shape {tensors[name].shape}, but the "
                    f"keys give {fits}; fetch the file again"
                )

    def _bytes(self, name: str) -> Tensor:
        stored = self._header.tensors[name]
        size = stored.end - stored.begin
        return self._mapped.view(Stored(torch.uint8, (size,), stored.begin, stored.end))

    def _read(self, name: str) -> Tensor:
        """Return the values of a tensor. They may be a view of the file: do not write to them."""
        stored = self._header.tensors[name]
        if stored.kind in UNQUANTIZED:
            at = Stored(UNQUANTIZED[stored.kind], stored.shape, stored.begin, stored.end)
            return self._mapped.view(at)
        return dequantize(self._bytes(name), stored.kind, stored.shape)

    @property
    def has_tokenizer(self) -> bool:
        """True if the file contains a tokenizer."""
        return has_vocabulary(self._header.keys)

    @property
    def tokenizer_folder(self) -> Path:
        """Raise a WorkhorseError: a GGUF file has no tokenizer folder, but contains a tokenizer."""
        raise WorkhorseError(
            f"{self.path} contains its tokenizer, but training needs a folder; create it by "
            f"workhorse convert {self.path} FOLDER --to workhorse"
        )

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer in the file.

        Raises:
            WorkhorseError: the tokenizer is damaged, or of an unsupported kind.
        """
        try:
            return read_vocabulary(self._header.keys, self.config.vocab_size)
        except WorkhorseError as error:
            raise WorkhorseError(f"{self.path}: {error}") from None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end generation; empty if only the tokenizer's eos does."""
        return end_tokens(self._header.keys, self.config.vocab_size)


def _architecture(keys: Mapping[str, Any]) -> Architecture:
    if keys.get("split.count", 1) != 1:
        raise WorkhorseError(
            "the file is one part of a split model; merge the parts with llama.cpp's gguf-split"
        )
    name = keys.get("general.architecture")
    known = {one.name: one for one in ARCHITECTURES}
    if not isinstance(name, str) or name not in known:
        words = nearest(name[:60], known) if isinstance(name, str) else "not a name"
        raise WorkhorseError(
            f"the GGUF architecture {shown(name)} is not supported ({words}); fetch the model's "
            "safetensors files"
        )
    return known[name]


def _number(value: Any) -> Any:
    """Undo the rounding of a metadata value to float32, see `shortest`."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return shortest(value) if isinstance(value, float) else value
