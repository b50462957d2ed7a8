"""Reads and writes the weights of a Hugging Face directory: one safetensors file, or shards.

Files are memory-mapped for reading, and nothing in them is trusted. Files are written atomically.
"""

import json
import math
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from workhorse.checkpoints.tensors import check_numbers
from workhorse.errors import WorkhorseError, shown
from workhorse.files.safetensors import MAX_HEADER_BYTES, Stored, header_bytes, read_header
from workhorse.files.text_formats import open_contained, read_json, unreadable
from workhorse.files.writing import replacing, write_atomically, writing
from workhorse.models.huggingface import Family
from workhorse.models.huggingface.moves import Move, Shape, TensorSource, check, plan
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 1_000  # the largest published model has fewer than 200
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
TensorToWrite = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]
"""A tensor to write: name, shape, dtype in the file, and the function that computes it."""
_RESIDENT_BYTES = 32_000_000
# Without this flag, Linux may refuse to map a file larger than its memory. Python names it from
# version 3.13 on.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class TensorFolder:
    """The tensors of a directory, by name. The constructor reads only the headers.

    `read` returns a view of the memory-mapped file. It releases pages that were read before, so
    that loading a model needs little more memory than the model.

    Args:
        path: the directory. `model.safetensors` is read if there is one, otherwise the shards that
            `model.safetensors.index.json` names.
        single: another name for `model.safetensors`.

    Raises:
        WorkhorseError: there are no weights, or only in formats that can run code; a file is
            damaged or a link to outside the directory; or the index and the shards differ.
    """

    def __init__(self, path: Path, single: str = SINGLE) -> None:
        self.path = path
        if not path.is_dir():
            raise WorkhorseError(f"{path} is not a folder; give the folder of a model")
        self._shards: list[MappedFile] = []
        self._stored: dict[str, Stored] = {}
        self._shard_of: dict[str, MappedFile] = {}
        if os.path.lexists(path / single):
            self._add(single)
        elif os.path.lexists(path / INDEX):
            self._add_shards(_weight_map(path))
        else:
            raise _no_weights(path)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: stored.shape for name, stored in self._stored.items()
        }
        self.dtypes: Mapping[str, torch.dtype] = {
            name: stored.dtype for name, stored in self._stored.items()
        }
        self._read_since_release = 0

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored, on the CPU. The caller must not write to it.

        Raises:
            KeyError: no tensor has this name.
        """
        shard, stored = self._shard_of[name], self._stored[name]
        if self._read_since_release > _RESIDENT_BYTES:
            for opened in self._shards:
                opened.release()
            self._read_since_release = 0
        self._read_since_release += stored.end - stored.begin
        return shard.view(stored)

    def _add(self, name: str) -> set[str]:
        """Map a safetensors file, register its tensors and return their names."""
        path = self.path / name
        with open_contained(self.path, name) as file:
            tensors = read_header(file, path)
            shard = MappedFile(file, path)
        if twice := self._stored.keys() & tensors.keys():
            raise WorkhorseError(
                f"{path}: tensor {shown(min(twice))} is also in another shard; fetch it again"
            )
        self._shards.append(shard)
        self._stored.update(tensors)
        self._shard_of.update(dict.fromkeys(tensors, shard))
        return set(tensors)

    def _add_shards(self, weight_map: Mapping[str, str]) -> None:
        names: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            names.setdefault(shard, set()).add(tensor)
        if len(names) > MAX_SHARDS:
            raise WorkhorseError(
                f"{self.path / INDEX} names {len(names)} files; at most {MAX_SHARDS} are supported"
            )
        found = {shard: self._add(shard) for shard in names}
        for shard, expected in names.items():
            if different := expected ^ found[shard]:
                name = min(different)
                where = "the index" if name in expected else "the shard"
                raise WorkhorseError(
                    f"{self.path / shard}: tensor {shown(name)} is only in {where}; "
                    "fetch both again"
                )


class MappedFile:
    """A memory-mapped file of tensors."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        # Private and writable, since PyTorch has no read-only tensors. No write gets to the disk.
        access = {"flags": mmap.MAP_PRIVATE | _NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        try:
            self._map = mmap.mmap(file.fileno(), 0, **access)
        except OSError as error:
            raise WorkhorseError(f"cannot map {path} into memory: {error.strerror}") from None

    def view(self, stored: Stored) -> Tensor:
        size = stored.end - stored.begin
        if size == 0:  # PyTorch cannot make a view of 0 bytes
            return torch.empty(stored.shape, dtype=stored.dtype)
        page = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
        # Read all pages in one request: reading each page on first use takes twice as long.
        self._map.madvise(mmap.MADV_WILLNEED, page, stored.end - page)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=stored.begin)
        if stored.begin % stored.dtype.itemsize:  # old writers did not align
            raw = raw.clone()
        return raw.view(stored.dtype).view(stored.shape)

    def release(self) -> None:
        """Release the memory of the pages that were read. Views read them again on the next use."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _weight_map(folder: Path) -> dict[str, str]:
    """Read each tensor's file name from the index file."""
    path = folder / INDEX
    weight_map = read_json(path, limit=MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WorkhorseError(
            f"{path} has weight_map={shown(weight_map)}, not a mapping of tensor names to file "
            "names; fetch it again"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise WorkhorseError(
                f"{path} has tensor {shown(name)} in {shown(shard)}, which is not a "
                "safetensors file; fetch it again"
            )
    return weight_map


def _no_weights(folder: Path) -> WorkhorseError:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return unreadable(folder, error)
    if unsafe := [name for name in names if name.endswith(UNSAFE)]:
        return WorkhorseError(
            f"{folder} has its weights only as {shown(unsafe[0])}, a format that can run code "
            "when it is read; if you trust it, convert it with transformers: "
            "model.save_pretrained(folder, safe_serialization=True)"
        )
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return WorkhorseError(
            f"{folder} has its weights only as {shown(gguf[0])}; "
            "fetch the safetensors files of the same model"
        )
    if parts := [name for name in names if name.endswith(".safetensors")]:
        return WorkhorseError(
            f"{folder} has {shown(parts[0])} but neither {SINGLE} nor {INDEX}; fetch it again"
        )
    return WorkhorseError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX} exists; give the folder of a model"
    )


def write_tensors(
    folder: Path,
    tensors: Iterable[TensorToWrite],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write tensors as transformers does: one file, or shards and then their index.

    Holds one tensor in memory at a time. Each file is written completely or not at all.

    Args:
        folder: the folder to write to; it is created if needed. It must not contain weights yet.
        tensors: the tensors to write; shards are filled in this order.
        max_shard_bytes: largest size of the tensors in a file. A larger tensor gets its own file.

    Raises:
        WorkhorseError: the folder contains weights, the disk is full or cannot be written, or a
            tensor contains NaN or values outside the range of the dtype that it is written in.
    """
    sized = [(math.prod(tensor[1]) * tensor[2].itemsize, tensor) for tensor in tensors]
    shards = _shards(sized, max_shard_bytes)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if others := [entry.name for entry in folder.iterdir() if ".safetensors" in entry.name]:
            raise WorkhorseError(
                f"{folder} already contains {min(others)!r}; choose another folder"
            )
        if len(shards) == 1:
            _write_file(folder / SINGLE, shards[0])
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_file(folder / file, shard)
            weight_map |= {name: file for name, *_ in shard}
        total = sum(size for size, _ in sized)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(
    sized: Iterable[tuple[int, TensorToWrite]], max_bytes: int
) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = [[]]
    filled = 0
    for size, tensor in sized:
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _write_file(path: Path, tensors: Iterable[TensorToWrite]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor[0])  # as the safetensors library does
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(header_bytes((name, dtype, shape) for name, shape, dtype, _ in ordered))
        for name, shape, dtype, make in ordered:
            tensor = make().detach()
            assert tensor.shape == shape, (name, tensor.shape, shape)
            plain = _written(name, tensor, dtype)
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)


def _written(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to the dtype and layout of the file."""
    check_numbers(name, tensor)
    written = tensor.to("cpu", dtype).contiguous()
    narrower = dtype == torch.float16 and tensor.dtype != dtype
    if narrower and torch.any(written.isinf() & tensor.cpu().isfinite()):
        raise WorkhorseError(
            f"{name} has values beyond float16's range; choose bfloat16 or float32"
        )
    return written


EMBEDDING, HEAD = "embedding.tokens.weight", "head.proj.weight"
WRAPPERS = re.compile(r"^(module\.)+|\b_orig_mod\.")
"""Prefixes that DistributedDataParallel and `torch.compile` add to tensor names."""


@dataclass(frozen=True)
class Account:
    """The result of `account`: the stored tensors from which each parameter is loaded."""

    moves: list[Move]
    source: TensorSource
    left_out: int
    """Number of stored tensors that are not loaded, such as an image encoder's tensors."""
    unwrapped: bool
    """True if a tensor name had a prefix of a compiled or distributed model (see `WRAPPERS`)."""


class Renamed:
    """Stored tensors, renamed to the names that the model family uses for a text model.

    The names in the file may lack the family's prefix (`model.`), or have the prefix of a
    multimodal model (`language_model.model.`, `model.language_model.`). Prefixes in `WRAPPERS` are
    removed.

    Args:
        source: the stored tensors.
        embedding: the family's name of the embedding tensor; it shows which prefix the file uses.
    """

    def __init__(self, source: TensorSource, embedding: str) -> None:
        unwrapped = {WRAPPERS.sub("", name): name for name in source.shapes}
        if len(unwrapped) < len(source.shapes):  # two tensors would have one name
            unwrapped = {name: name for name in source.shapes}
        self.unwrapped = any(name != stored for name, stored in unwrapped.items())
        base = embedding.partition(".")[0] + "."
        inside = base + "language_model."
        prefixes = (("", ""), ("", base), (inside, base), ("language_model.", ""))
        found = (
            (old, new)
            for old, new in prefixes
            if embedding.startswith(new) and old + embedding.removeprefix(new) in unwrapped
        )
        self._source = source
        self._old, self._new = next(found, ("", ""))
        text = self._old or base
        self._texts = {self._renamed(name) for name in unwrapped if name.startswith(text)}
        self._stored = {self._renamed(name): stored for name, stored in unwrapped.items()}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: self._source.shapes[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._stored[name])

    def is_text(self, name: str) -> bool:
        """True if a tensor belongs to the text model, by the prefix of its name."""
        return name in self._texts

    def _renamed(self, name: str) -> str:
        if name.startswith("lm_head.") or not name.startswith(self._old):
            return name
        return self._new + name.removeprefix(self._old)


def meta_decoder(
    config: DecoderConfig,
    kernel: KernelName,
    dtype: torch.dtype,
    *,
    n_tensors: int,
    source: str = "config.json",
) -> Decoder:
    """Build the decoder of an untrusted config on the meta device, without allocating memory.

    Args:
        config: the decoder's config.
        kernel: attention kernel.
        dtype: dtype of the weights.
        n_tensors: number of stored tensors. A config with more layers is rejected.
        source: the file that the config comes from, for error messages.

    Raises:
        WorkhorseError: the config does not describe a possible model.
    """
    if config.n_layers > n_tensors:
        raise WorkhorseError(
            f"{source} has {config.n_layers} layers for {n_tensors} tensors; "
            "they belong to different models"
        )
    try:
        return config.build(kernel, device="meta", dtype=dtype)
    except (RuntimeError, OverflowError, MemoryError) as error:
        reason = str(error).splitlines()[0]
        raise WorkhorseError(f"{source} does not describe a possible model: {reason}") from None


def shapes_of(decoder: Decoder) -> dict[str, Shape]:
    """Return the shape of each parameter of a decoder, by name."""
    return {name: tuple(weight.shape) for name, weight in decoder.named_parameters()}


def account(
    family: Family,
    config: DecoderConfig,
    shapes: Mapping[str, Shape],
    source: TensorSource,
    *,
    wrapped: bool,
) -> Account:
    """Find the stored tensors for each parameter, and check that each stored tensor is used.

    Args:
        family: the family that defines the names of the stored tensors.
        config: the decoder's config.
        shapes: shapes of the decoder's parameters, by name.
        source: the stored tensors.
        wrapped: True for a multimodal model. Only its text model is loaded.

    Raises:
        WorkhorseError: a tensor is missing, unexpected, used twice or has a wrong shape.
    """
    embedding = _their_name(family, EMBEDDING, shapes, config)
    renamed = Renamed(source, embedding)
    stored = renamed.shapes
    moves = plan(family.rules, shapes, config, stored)
    check(moves, shapes, renamed)
    used = [name for move in moves for name in move.theirs]
    if len(used) != len(set(used)):
        twice = next(name for name in used if used.count(name) > 1)
        raise WorkhorseError(
            f"tensor {twice!r} would be read twice; config.json belongs to another model"
        )
    rest = sorted(set(stored) - set(used))
    if config.head.tied:
        rest = _without_tied_head(rest, family, config, shapes, renamed)
    ignored = re.compile("|".join(family.ignored) or r"(?!)")
    rest = [name for name in rest if not ignored.fullmatch(name)]
    others = [name for name in rest if wrapped and not renamed.is_text(name)]
    rest = [name for name in rest if name not in others]
    if rest:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        raise WorkhorseError(
            f"tensor {rest[0]!r}{more} is not part of this {family.model_type} model; "
            "config.json belongs to another model"
        )
    return Account(moves, renamed, len(others), renamed.unwrapped)


def _their_name(
    family: Family, ours: str, shapes: Mapping[str, Shape], config: DecoderConfig
) -> str:
    return plan(family.rules, {ours: shapes[ours]}, config)[0].theirs[0]


def _without_tied_head(
    rest: list[str],
    family: Family,
    config: DecoderConfig,
    shapes: Mapping[str, Shape],
    source: Renamed,
) -> list[str]:
    """Remove the head from `rest`: old files store it even if it is tied to the embedding."""
    embedding = _their_name(family, EMBEDDING, shapes, config)
    head = _their_name(family, HEAD, {HEAD: shapes[EMBEDDING]}, config)
    if head not in rest:
        return rest
    if not torch.equal(source.read(head), source.read(embedding)):
        raise WorkhorseError(
            f"tie_word_embeddings is true but {head!r} differs from {embedding!r}; "
            "set it to false in config.json to keep both"
        )
    return [name for name in rest if name != head]
