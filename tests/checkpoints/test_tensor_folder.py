"""Safetensors folders: written tensors are read, bad files fail, and little memory is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from workhorse.checkpoints.huggingface.tensor_folder import (
    INDEX,
    SINGLE,
    TensorFolder,
    write_tensors,
)
from workhorse.errors import WorkhorseError
from workhorse.files.safetensors import DTYPES, header_bytes

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(7.0),
    "empty": torch.zeros(3, 0),
    "z": torch.arange(1000.0),
}


def makers(tensors, dtype=torch.float32):
    return [(name, tuple(t.shape), dtype, lambda t=t: t) for name, t in tensors.items()]


def read_all(folder):
    source = TensorFolder(folder)
    return {name: source.read(name).clone() for name in source.shapes}


def equal(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(_bytes(one[name]), _bytes(other[name]))
        for name in one
    )


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def raw_file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + raw + data)


def entry(shape, begin, end, dtype: object = "F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_file_is_byte_for_byte_that_of_the_safetensors_library(tmp_path, dtype):
    write_tensors(tmp_path / "ours", makers(TENSORS, dtype))
    theirs = tmp_path / SINGLE
    save_file({name: t.to(dtype) for name, t in TENSORS.items()}, theirs, {"format": "pt"})
    assert (tmp_path / "ours" / SINGLE).read_bytes() == theirs.read_bytes()


def test_shards_and_their_index(tmp_path):
    write_tensors(tmp_path, makers(TENSORS), max_shard_bytes=40)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 * 4 + 4 + 1000 * 4
    assert index["weight_map"]["z"] == names[1]  # larger than a shard, so in its own file
    assert equal(load_file(tmp_path / names[0]), {k: TENSORS[k] for k in ("a", "b", "empty")})
    assert equal(read_all(tmp_path), TENSORS)


def test_transformers_shards_are_read(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=100))
    model.save_pretrained(tmp_path, max_shard_size=10_000)
    source = TensorFolder(tmp_path)
    state = model.state_dict()
    del state["lm_head.weight"]  # tied
    assert equal(read_all(tmp_path), state)
    assert source.shapes["transformer.wte.weight"] == (100, 16)
    assert source.dtypes["transformer.wte.weight"] == torch.float32


@given(
    st.lists(
        st.tuples(
            st.sampled_from([t for t in DTYPES.values() if t != torch.bool]),
            st.lists(st.integers(0, 4), max_size=4),
        ),
        max_size=6,
    ),
    st.integers(0, 7),
)
def test_every_type_and_shape_is_read_at_any_alignment(tmp_path_factory, kinds, padding):
    """`padding` gives the header any length, as old writers did, and misaligns the tensors."""
    folder = tmp_path_factory.mktemp("model")
    header, data, expected = {"__metadata__": {"pad": "x" * padding}}, b"", {}
    for number, (dtype, shape) in enumerate(kinds):
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
        name = next(key for key, value in DTYPES.items() if value == dtype)
        header[f"t{number}"] = entry(shape, len(data), len(data) + size, name)
        expected[f"t{number}"] = raw.view(dtype).reshape(shape)
        data += raw.numpy().tobytes()
    raw_file(folder / SINGLE, header, data)
    assert equal(read_all(folder), expected)


def test_what_the_writer_is_given_is_cast_and_made_in_turn(tmp_path):
    alive = []

    def make(value):
        alive.append(value)
        return torch.full((2, 3), value, dtype=torch.float64).T

    shape = (3, 2), torch.bfloat16
    tensors = [("b", *shape, lambda: make(2.0)), ("a", *shape, lambda: make(1.0))]
    write_tensors(tmp_path, tensors)
    assert alive == [1.0, 2.0]
    assert equal(
        read_all(tmp_path),
        {"a": torch.ones(3, 2).bfloat16(), "b": torch.full((3, 2), 2).bfloat16()},
    )


def test_weights_are_not_written_among_others(tmp_path):
    write_tensors(tmp_path, makers(TENSORS))
    with pytest.raises(
        WorkhorseError, match=r"already contains 'model.safetensors'; choose another"
    ):
        write_tensors(tmp_path, makers(TENSORS), max_shard_bytes=1)


def test_a_failed_write_leaves_no_file(tmp_path):
    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        write_tensors(tmp_path, [*makers(TENSORS), ("zz", (1,), torch.float32, fail)])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(WorkhorseError, match=r"^cannot write .*: Not a directory; choose"):
        write_tensors(tmp_path / "file" / "folder", makers(TENSORS))


def test_a_view_is_not_the_file(tmp_path):
    write_tensors(tmp_path, makers(TENSORS))
    before = (tmp_path / SINGLE).read_bytes()
    TensorFolder(tmp_path).read("z").zero_()
    assert (tmp_path / SINGLE).read_bytes() == before


def test_views_outlive_the_folder_and_the_release_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("workhorse.checkpoints.huggingface.tensor_folder._RESIDENT_BYTES", 0)
    write_tensors(tmp_path, makers(TENSORS), max_shard_bytes=40)
    source = TensorFolder(tmp_path)
    views = {name: source.read(name) for name in source.shapes}
    del source
    assert equal(views, TENSORS)


BAD_HEADERS = {
    "header longer than the file": ((b"{}", b"", 10_000), "has 10 bytes, fewer than its header of"),
    "not UTF-8": ((b'{"\xff": 1}', b"", None), "is not UTF-8: bad byte at offset 2"),
    "not JSON": ((b"cos\nsystem\n", b"", None), "is not valid JSON"),
    "a list": ((b"[]", b"", None), r"is \[\], not a JSON object"),
    "a key twice": ((b'{"a": 1, "a": 2}', b"", None), "the key 'a' occurs twice"),
    "metadata": (({"__metadata__": {"a": 1}}, b"", None), "not a mapping of strings"),
    "no entry": (({"a": 5}, b"", None), "tensor 'a' is 5, not a dtype, a shape"),
    "dtype": (
        ({"a": entry([1], 0, 4, "F33")}, bytes(4), None),
        "has unknown dtype 'F33'; known: BOOL",
    ),
    "dtype of a type": (({"a": entry([1], 0, 4, [])}, bytes(4), None), r"has unknown dtype \[\]"),
    "negative shape": (({"a": entry([-1], 0, 4)}, bytes(4), None), "has invalid shape"),
    "true as a number": (({"a": entry([True], 0, 4)}, bytes(4), None), "has invalid shape"),
    "rank": (({"a": entry([1] * 17, 0, 4)}, bytes(4), None), "has invalid shape"),
    "overflow": (({"a": entry([1 << 62, 4], 0, 4)}, bytes(4), None), "needs 73786976294838206464"),
    "offsets": (({"a": entry([1], 4, 0)}, bytes(4), None), "data_offsets span -4"),
    "overlap": (
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8), None),
        "tensor 'b' overlaps the previous one",
    ),
    "gap": (
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12), None),
        "tensor 'b' follows unused bytes",
    ),
    "cut short": (({"a": entry([100], 0, 400)}, bytes(399), None), "is truncated"),
    "bytes of no tensor": (
        ({"a": entry([1], 0, 4)}, bytes(5), None),
        "has extra bytes after the last tensor",
    ),
    "name": (
        ({"a\x00b": entry([1], 0, 4)}, bytes(4), None),
        r"'a\\x00b' has an invalid name",
    ),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_header_that_cannot_be(tmp_path, case):
    (header, data, length), message = BAD_HEADERS[case]
    raw_file(tmp_path / SINGLE, header, data, length=length)
    with pytest.raises(WorkhorseError, match=message) as refusal:
        TensorFolder(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def sharded(tmp_path):
    write_tensors(tmp_path, makers(TENSORS), max_shard_bytes=40)

    def change(**weight_map):
        index = json.loads((tmp_path / INDEX).read_text())
        for name, shard in weight_map.items():
            index["weight_map"][name] = shard
        (tmp_path / INDEX).write_text(json.dumps(index))
        return tmp_path

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": "../x.safetensors"}, "is not the name of a file in the folder"),
        ({"a": "/etc/x.safetensors"}, "is not the name of a file in the folder"),
        ({"a": "x\x00.safetensors"}, "is not the name of a file in the folder"),
        ({"a": "x.bin"}, "in 'x.bin', which is not a safetensors file"),
        ({"a": 5}, "in 5, which is not a safetensors file"),
        ({"a": "gone.safetensors"}, "gone.safetensors is missing; download the model again"),
        ({"more": "model-00001-of-00002.safetensors"}, "tensor 'more' is only in the index"),
        ({"a": "model-00002-of-00002.safetensors"}, "tensor 'a' is only in the (index|shard)"),
    ],
)
def test_an_index_that_cannot_be(sharded, change, message):
    with pytest.raises(WorkhorseError, match=message):
        TensorFolder(sharded(**change))


def test_a_tensor_in_two_shards(sharded):
    folder = sharded(a="third.safetensors")
    save_file({"a": torch.ones(2)}, folder / "third.safetensors")
    with pytest.raises(
        WorkhorseError, match=r"tensor 'a' is also in another shard|only in the shard"
    ):
        TensorFolder(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "has no weights: neither model.safetensors nor"),
        ("pytorch_model.bin", "a format that can run code when it is read; if you trust it"),
        ("consolidated.00.pth", "a format that can run code when it is read; if you trust it"),
        ("tf_model.h5", "a format that can run code when it is read; if you trust it"),
        ("model.Q8_0.gguf", "fetch the safetensors files of the same model"),
        (
            "model-00001-of-00002.safetensors",
            "but neither model.safetensors nor .*; fetch it again",
        ),
    ],
)
def test_a_folder_without_weights_that_can_be_read(tmp_path, file, message):
    if file:
        (tmp_path / file).touch()
    with pytest.raises(WorkhorseError, match=message):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("name", [SINGLE, INDEX, "model-00001-of-00002.safetensors"])
def test_no_file_may_be_a_link_out_of_the_folder(tmp_path, name):
    folder = tmp_path / "model"
    limit = 5_000_000_000 if name == SINGLE else 40
    write_tensors(folder, makers(TENSORS), max_shard_bytes=limit)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(WorkhorseError, match="is a link out of its folder"):
        TensorFolder(folder)


def test_what_is_no_folder(tmp_path):
    with pytest.raises(WorkhorseError, match="is not a folder"):
        TensorFolder(tmp_path / "nothing")


def test_a_header_of_a_hundred_thousand_tensors(tmp_path):
    names = (f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.gate.weight" for i in range(100_000))
    (tmp_path / SINGLE).write_bytes(header_bytes((name, torch.int8, (0,)) for name in names))
    assert len(TensorFolder(tmp_path).shapes) == 100_000


PEAK = """
import resource, sys, torch
from pathlib import Path
from workhorse.checkpoints.huggingface.tensor_folder import TensorFolder
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
source = TensorFolder(Path(sys.argv[1]))
copies = {name: torch.empty(shape) for name, shape in source.shapes.items()}
before = peak()
for name, copy in copies.items():
    copy.copy_(source.read(name))
print((peak() - before) / sum(copy.nbytes for copy in copies.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in another unit")
def test_copying_everything_away_needs_the_copies_and_little_more(tmp_path):
    """The folder has 320 MB, in tensors of 8 MB and two shards. Mapped pages are measured too."""
    tensors = [
        (f"t{i}", (2_000_000,), torch.float32, lambda: torch.rand(2_000_000)) for i in range(40)
    ]
    write_tensors(tmp_path, tensors, max_shard_bytes=200_000_000)
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    assert float(subprocess.check_output(command, text=True)) < 1.15
