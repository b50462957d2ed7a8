"""Weight files with false headers, indexes or locations."""

import torch

from tests.campaigns.hostile.directories import (
    INDEX,
    SHARD,
    WEIGHTS,
    Case,
    config,
    content,
    directory,
    entry,
    header,
    index,
    instead,
    link,
    pipe,
    remove,
    several,
    sparse,
    weights,
)

GENERATION = "generation_config.json"
HEAD = "lm_head.weight"


def _start(folder, length):
    """Write the header's length into an existing file."""
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(length.to_bytes(8, "little"))


_ONE = {"a": entry([1], 0, 4)}
HEADERS = {
    "a header of 2^63 bytes": Case(header("{}", length=2**63), "bytes, fewer than its header of"),
    "a header beyond the file": Case(header("{}", length=1000), "bytes, fewer than its header of"),
    "a header of a gigabyte": Case(
        several(sparse(WEIGHTS, 2**31), lambda folder: _start(folder, 2**30)),
        "larger than the limit of",
    ),
    "a header of a million lists": Case(
        header('{"a": [' + "[]," * 1_200_000 + "[]]}"), "more than 850000 values"
    ),
    "a header of many tensors": Case(
        header({f"t{i}": entry([1, 0], 0, 0) for i in range(110_000)}), "more than 850000 values"
    ),
    "a header of just few enough tensors": Case(
        header({f"t{i}": entry([0], 1, 1) for i in range(100_000)}), "follows unused bytes"
    ),
    "a header with 100,000 nested lists": Case(header('{"a": ' + "[" * 100_000), "nested deeper"),
    "a header with a duplicate key": Case(
        header('{"a": {"dtype": "F32", "dtype": "F16"}}'), "'dtype' occurs twice"
    ),
    "a header that is Python code": Case(
        header("__import__('os').system('true')"), "not valid JSON"
    ),
    "an empty file": Case(content(WEIGHTS, ""), "ends within its header"),
    "a negative shape": Case(header({"a": entry([-1, -1], 0, 4)}, bytes(4)), "has invalid shape"),
    "a shape that overflows": Case(
        header({"a": entry([2**32, 2**32], 0, 0)}, b""), "needs 73786976294838206464 bytes"
    ),
    "a shape of many digits": Case(
        header({"a": entry([10**4000], 0, 4)}, bytes(4)), "has invalid shape"
    ),
    "a shape of many axes": Case(
        header({"a": entry([2**62] * 100_000, 0, 4)}, bytes(4)), "has invalid shape"
    ),
    "a shape of fractions": Case(header({"a": entry([1.5], 0, 4)}, bytes(4)), "has invalid shape"),
    "an end offset before the start": Case(
        header({"a": entry([1], 4, 0)}, bytes(4)), "data_offsets span -4"
    ),
    "offsets beyond the file": Case(
        header({"a": entry([1], 2**62, 2**62 + 4)}, bytes(4)), "unused"
    ),
    "tensors that overlap": Case(
        header({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)), "overlaps"
    ),
    "bytes between tensors": Case(
        header({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)), "follows unused bytes"
    ),
    "a truncated file": Case(header({"a": entry([1000], 0, 4000)}, bytes(3999)), "is truncated"),
    "extra bytes after the last tensor": Case(
        header(_ONE, bytes(1000)), "has extra bytes after the last tensor"
    ),
    "an unknown dtype": Case(header({"a": entry([1], 0, 4, "OBJECT")}, bytes(4)), "'OBJECT'"),
    "a name of a megabyte": Case(
        header({"a" * 1_000_000: entry([1], 0, 4)}, bytes(4)), "has an invalid name"
    ),
    "a name with a zero byte": Case(
        header({"a\x00b": entry([1], 0, 4)}, bytes(4)), "has an invalid name"
    ),
    "a huge shape with an axis of 0": Case(
        weights(lm_head__weight=torch.zeros(2**40, 0)), "lm_head.weight"
    ),
}
FILES = {
    "no weights": Case(remove(WEIGHTS), "has no weights"),
    "weights are a pipe": Case(pipe(WEIGHTS), "is a special file"),
    "weights are a folder": Case(directory(WEIGHTS), "is a folder"),
    "weights are outside": Case(link(WEIGHTS, "../outside/model.safetensors"), "link out of"),
    "weights are a link to a device": Case(link(WEIGHTS, "/dev/zero"), "link out of its folder"),
    "weights are a link to /proc/self/mem": Case(
        link(WEIGHTS, "/proc/self/mem"), "link out of its folder"
    ),
    "weights are a link to themselves": Case(link(WEIGHTS, WEIGHTS), "symbolic links"),
    "weights are a link to a missing cache": Case(
        link(WEIGHTS, "../../blobs/" + "a" * 40), "is missing"
    ),
    "index names a file in the parent folder": Case(
        index(instead("../outside/model.safetensors")), "is not the name of a file"
    ),
    "index names an absolute path": Case(
        index(instead("/outside/model.safetensors")), "is not the name of a file"
    ),
    "index names a file in a subfolder": Case(
        index(instead("a/b.safetensors")), "is not the name of a file"
    ),
    "index names a path with backslashes": Case(
        index(instead("..\\x.safetensors")), "is not the name of a file"
    ),
    "index with a zero byte": Case(
        index(instead("a\x00.safetensors")), "is not the name of a file"
    ),
    "index names a pickle": Case(index(instead("x.bin")), "is not a safetensors file"),
    "index names a number": Case(index(instead(5)), "is not a safetensors file"),  # pyright: ignore
    "index names a missing file": Case(index(instead("x.safetensors")), "is missing"),
    "index lacks a tensor": Case(index(lambda names: names.pop(HEAD)), "is only in the shard"),
    "index has an extra tensor": Case(
        index(lambda names: names.update(x=SHARD)), "is only in the index"
    ),
    "index names many files": Case(
        index(lambda names: names.update({f"t{i}": f"{i}.safetensors" for i in range(5000)})),
        "files; at most 1000 are supported",
    ),
    "index is empty": Case(index(lambda names: names.clear()), "not a mapping of tensor names"),
    "index with nested lists": Case(
        index(len, content(INDEX, '{"weight_map": ' + "[" * 99_999)), "nested"
    ),
    "index is outside": Case(
        index(len, link(INDEX, "../outside/config.json")), "link out of its folder"
    ),
    "a shard is outside": Case(
        index(len, link(SHARD, "../outside/blob")), "link out of its folder"
    ),
    "a shard is a pipe": Case(index(len, pipe(SHARD)), "is a special file"),
    "a tensor is in two shards": Case(
        index(
            instead("two.safetensors"),
            lambda folder: (folder / "two.safetensors").write_bytes((folder / SHARD).read_bytes()),
        ),
        "is also in another shard",
    ),
    "a tensor is missing": Case(weights(lm_head__weight=None), HEAD),
    "an extra tensor": Case(weights(evil=torch.zeros(1)), "evil"),
    "a tensor of another shape": Case(weights(lm_head__weight=torch.zeros(16, 257)), HEAD),
    "scales without weights": Case(
        several(
            config(quantization_config={"quant_method": "fp8"}),
            weights(x_scale_inv=torch.zeros(1)),
        ),
        "is a scale without a float8 tensor",
    ),
    "scales that do not fit the blocks": Case(
        several(
            config(quantization_config={"quant_method": "mxfp4"}),
            weights(
                x_blocks=torch.zeros(2, 4, 1, 16, dtype=torch.uint8),
                x_scales=torch.zeros(2, 4, 2, dtype=torch.uint8),
            ),
        ),
        "mxfp4 needs uint8",
    ),
    "stop tokens are a pipe": Case(pipe(GENERATION), "is a special file"),
    "stop tokens are outside": Case(
        link(GENERATION, "../outside/config.json"), "link out of its folder"
    ),
    "stop tokens nest": Case(content(GENERATION, "[" * 100_000), "nested deeper"),
    "many stop tokens": Case(
        content(GENERATION, '{"eos_token_id": [' + "1," * 900_000 + "1]}"), None
    ),
}
CASES: dict[str, Case] = HEADERS | FILES
