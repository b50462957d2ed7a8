"""Reads and writes a model in Workhorse's own format, which supports any config.

workhorse.json       the decoder's config, and the stop tokens
model.safetensors    its weights under Workhorse's names, or an index and several such files
tokenizer/
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workhorse.checkpoints.huggingface.tensor_folder import (
    TensorFolder,
    meta_decoder,
    shapes_of,
    write_tensors,
)
from workhorse.checkpoints.runs.manifest import Disk
from workhorse.checkpoints.tensors import Places, allocate, weights_of
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import read_json
from workhorse.files.writing import replacing, writing
from workhorse.models.huggingface.moves import (
    Move,
    Shape,
    check,
    read_tensors,
    same,
    written_tensors,
)
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

DESCRIPTION = "workhorse.json"
TOKENIZER = "tokenizer"
FORMAT = 1


class ModelFolder:
    """A folder written by `write_model`.

    Args:
        path: the folder; `workhorse.json` is read immediately, the weights when they are needed.

    Raises:
        WorkhorseError: `workhorse.json` is damaged, or written by a later version.
    """

    kind = "folder of workhorse convert"
    family = None

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        values = read_json(self.path / DESCRIPTION)
        if values.get("format") != FORMAT:
            raise WorkhorseError(
                f"{self.path / DESCRIPTION} has format {values.get('format')!r}, but this version "
                f"reads {FORMAT}; use the version of Workhorse that wrote it"
            )
        try:
            self.config = DecoderConfig.from_dict(values.get("config"))
        except ConfigError as error:
            raise WorkhorseError(
                f"{self.path / DESCRIPTION} is damaged: {error}; restore the original file"
            ) from None
        self.stop_tokens = tuple(values.get("stop_tokens", ()))
        self.tokenizer_folder = self.path / TOKENIZER
        self.has_tokenizer = self.tokenizer_folder.exists()
        self.remarks: list[str] = []

    @staticmethod
    def is_one(path: Path) -> bool:
        """True if a folder looks like a model in this format."""
        return (path / DESCRIPTION).exists()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding."""
        return TensorFolder(self.path).dtypes.get("embedding.tokens.weight", torch.float32)

    def load_decoder(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        kernel: KernelName = "auto",
        places: Places = weights_of,
    ) -> Decoder:
        """Build the decoder and load its weights; see `StoredModel.load_decoder`.

        Raises:
            WorkhorseError: a tensor is missing, unexpected or has a wrong shape, or a file is
                damaged.
        """
        source = TensorFolder(self.path)
        dtype = dtype or self.dtype
        decoder = meta_decoder(self.config, kernel, dtype, n_tensors=len(source.shapes))
        shapes = shapes_of(decoder)
        moves = _same_names(shapes, self.config)
        check(moves, shapes, source)
        if extra := sorted(source.shapes.keys() - shapes.keys()):
            raise WorkhorseError(
                f"{self.path}: tensor {extra[0]!r} is not part of the model in {DESCRIPTION}; "
                "restore the original files"
            )
        read_tensors(moves, places(allocate(decoder, device)), source)
        return decoder.eval()

    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer."""
        from workhorse.tokenizers import load_tokenizer

        return load_tokenizer(self.tokenizer_folder)


def write_model(
    folder: Path,
    decoder: Decoder,
    *,
    tokenizer: "Tokenizer | None",
    dtype: torch.dtype | None = None,
    stop_tokens: tuple[int, ...] = (),
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a decoder and its tokenizer in Workhorse's own format.

    Args:
        folder: a new or empty folder; it is written completely or not at all.
        decoder: the decoder to write.
        tokenizer: its tokenizer, or None.
        dtype: dtype of the written weights; the decoder's dtype by default.
        stop_tokens: ids of the tokens that end generation; if empty, the tokenizer's eos.
        weights: the weights to write, by name; None: those of the decoder.

    Raises:
        WorkhorseError: the folder is in use or cannot be written.
    """
    own = weights_of(decoder)
    shapes = {name: tuple(weight.shape) for name, weight in own.items()}
    dtype = dtype or decoder.embedding.tokens.weight.dtype
    moves = _same_names(shapes, decoder.config)
    tensors = written_tensors(moves, own if weights is None else weights, dtype, shapes)
    description: dict[str, Any] = {
        "format": FORMAT,
        "config": decoder.config.to_dict(),
        "stop_tokens": list(stop_tokens),
    }

    def fill(temporary: Path) -> None:
        text = json.dumps(description, indent=2) + "\n"
        Disk().write_text(temporary / DESCRIPTION, text)
        write_tensors(temporary, tensors)
        if tokenizer is not None:
            tokenizer.save(temporary / TOKENIZER)

    make_folder(folder, fill)


def _same_names(shapes: Mapping[str, Shape], config: DecoderConfig) -> list[Move]:
    """Map each weight to the stored tensor of the same name."""
    block = next(iter(config.blocks.values()))
    return [Move(same(name, name), (name,), (name,), block) for name in shapes]


def check_new(folder: Path) -> None:
    """Check that a new folder can be written at a path.

    Raises:
        WorkhorseError: the path is a file, a dangling link, or a folder that is not empty or cannot
            be read; or the name is not valid.
    """
    with writing(folder):
        if folder.is_symlink() and not folder.exists():
            raise WorkhorseError(f"{folder} is a dangling link; remove it or choose another folder")
        if folder.exists() and not folder.is_dir():
            raise WorkhorseError(f"{folder} is a file; choose another name for the folder")
        if folder.exists() and any(folder.iterdir()):
            raise WorkhorseError(f"{folder} exists and is not empty; choose another folder")


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder atomically: `fill` writes into a temporary folder, which is then renamed.

    Raises:
        WorkhorseError: the folder is in use, or the disk is full or cannot be written.
    """
    check_new(folder)
    with replacing(folder, folder=True) as temporary:
        fill(temporary)
