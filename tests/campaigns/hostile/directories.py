"""Malicious model directories, each made by a small change to a valid one.

A folder `outside` next to the directory must never be read. A file `executed` appears there if
code of the model is run.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (257, 16),
    "lm_head.weight": (257, 16),
    "model.norm.weight": (16,),
    f"{LAYER}input_layernorm.weight": (16,),
    f"{LAYER}post_attention_layernorm.weight": (16,),
    f"{LAYER}self_attn.q_proj.weight": (16, 16),
    f"{LAYER}self_attn.k_proj.weight": (8, 16),
    f"{LAYER}self_attn.v_proj.weight": (8, 16),
    f"{LAYER}self_attn.o_proj.weight": (16, 16),
    f"{LAYER}mlp.gate_proj.weight": (32, 16),
    f"{LAYER}mlp.up_proj.weight": (32, 16),
    f"{LAYER}mlp.down_proj.weight": (16, 32),
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"

Build = Callable[[Path], object]


class Case(NamedTuple):
    """One malicious directory.

    Attributes:
        build: function that changes a valid directory.
        says: text that the error must contain; None if the directory may also be loaded, as long as
            it does no harm.
    """

    build: Build
    says: str | None


def sound(folder: Path) -> None:
    """Write a valid directory."""
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
    save_file(tensors(), folder / WEIGHTS, {"format": "pt"})
    (folder / "tokenizer.json").write_text(byte_tokenizer())


def surroundings(folder: Path) -> None:
    """Write the target of links and paths: a valid model that must not be read."""
    outside = folder.parent / "outside"
    outside.mkdir()
    sound(outside)
    (outside / "blob").write_bytes((outside / WEIGHTS).read_bytes())


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def byte_tokenizer() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer.to_str()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


class Bomb:
    """An object with a pickle that runs a command when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def marker(folder: Path) -> Path:
    return folder.parent / "executed"


def config(**changes: Any) -> Build:
    """Change values in config.json; `...` removes a key."""

    def build(folder: Path) -> None:
        merged = {k: v for k, v in {**CONFIG, **changes}.items() if v is not ...}
        write_json(folder / "config.json", merged)

    return build


def settings(**values: Any) -> Build:
    return lambda folder: write_json(folder / "tokenizer_config.json", values)


def template(text: str) -> Build:
    return settings(chat_template=text)


def content(name: str, data: bytes | str) -> Build:
    """Replace a file's content."""

    def build(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return build


def sparse(name: str, size: int) -> Build:
    """A sparse file of `size` zero bytes, which uses no disk space."""

    def build(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return build


def link(name: str, target: str) -> Build:
    def build(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return build


def pipe(name: str) -> Build:
    """A named pipe, which blocks every program that opens it."""

    def build(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return build


def directory(name: str) -> Build:
    def build(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return build


def pickled(name: str, *, by_torch: bool = False) -> Build:
    """The weights as a pickle that runs a command."""

    def build(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        bomb = Bomb(marker(folder))
        if by_torch:
            torch.save(bomb, folder / name)
        else:
            (folder / name).write_bytes(pickle.dumps(bomb))

    return build


def code(name: str, **auto_map: Any) -> Build:
    """A module that must not be imported, named in config.json and the tokenizer's settings."""

    def build(folder: Path) -> None:
        (folder / name).write_text(f"open({str(marker(folder))!r}, 'w')\n")
        config(**auto_map)(folder)
        write_json(
            folder / "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": [f"{name[:-3]}.Evil", None]}, "tokenizer_class": "Evil"},
        )

    return build


def header(value: bytes | str | dict[str, Any], data: bytes = b"", length: int = -1) -> Build:
    """Weights with this header and, if `length` is given, a false header length."""
    raw = json.dumps(value) if isinstance(value, dict) else value
    raw = raw.encode() if isinstance(raw, str) else raw
    size = (len(raw) if length < 0 else length).to_bytes(8, "little")
    return content(WEIGHTS, size + raw + data)


def entry(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def weights(**changes: torch.Tensor | None) -> Build:
    """Change tensors, with `__` for the dots of a name; None removes a tensor."""

    def build(folder: Path) -> None:
        changed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        merged = {k: v for k, v in {**tensors(), **changed}.items() if v is not None}
        save_file(merged, folder / WEIGHTS)

    return build


def index(change: Callable[[dict[str, Any]], object], *more: Build) -> Build:
    """Store the weights as one shard with an index, and change the index's weight map."""

    def build(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / SHARD)
        weight_map = dict.fromkeys(SHAPES, SHARD)
        change(weight_map)
        write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
        for step in more:
            step(folder)

    return build


def instead(shard: str) -> Callable[[dict[str, Any]], object]:
    """Name another file for one tensor."""
    return lambda weight_map: weight_map.update({"lm_head.weight": shard})


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Build:
    def build(folder: Path) -> None:
        definition = json.loads(byte_tokenizer())
        change(definition)
        write_json(folder / "tokenizer.json", definition)

    return build


def several(*steps: Build) -> Build:
    def build(folder: Path) -> None:
        for step in steps:
            step(folder)

    return build


def make(case: Case, folder: Path) -> Path:
    """Build a case in `folder/model`."""
    model = folder / "model"
    model.mkdir(parents=True)
    sound(model)
    surroundings(model)
    case.build(model)
    return model


def remove(name: str) -> Build:
    return lambda folder: (folder / name).unlink()
