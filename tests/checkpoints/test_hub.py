"""Tests of models on the hub: the downloaded files, and the error messages.

Each case runs in its own process, since the library reads the environment when it is imported. The
tests need no network: they use a prepared cache on the disk, and a local hub.
"""

import runpy
from pathlib import Path

import pytest

from tests.checkpoints.fetching import fetch
from tests.parallel.forked import start
from workhorse.checkpoints.huggingface.load import resolve_model
from workhorse.errors import WorkhorseError

HUB = runpy.run_path(str(Path(__file__).with_name("hub_server.py")))
serve, COMMIT = HUB["serve"], HUB["COMMIT"]
NAME = "org/tiny-model"


@pytest.fixture
def resolve(tmp_path):
    """Resolves names ("NAME REVISION") with a cache in `tmp_path`; returns the output lines."""

    def run(*names, **environment):
        said = tmp_path / "said"
        whole = {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", **environment}
        start(fetch, (names, whole, said), 1)
        return said.read_text().splitlines()

    return run


@pytest.fixture
def snapshot(tmp_path):
    """A cached model in the directory layout of the library."""
    repository = tmp_path / "hub" / "models--org--tiny-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_offline_from_the_cache(resolve, snapshot):
    assert resolve(NAME, f"{NAME}@{COMMIT}", f"{NAME} {COMMIT}", HF_HUB_OFFLINE="1") == [
        f"{NAME} at main is commit {COMMIT}; pin it with @{COMMIT}",
        *[str(snapshot)] * 3,
    ]


@pytest.mark.usefixtures("snapshot")
def test_offline_and_not_cached(resolve, tmp_path):
    other, revision = resolve("org/other", f"{NAME}@v2", HF_HUB_OFFLINE="1")
    assert other == (
        f"refused: org/other at main is not completely in the cache {tmp_path / 'hub'} and "
        "HF_HUB_OFFLINE is set; unset it, or give a local folder"
    )
    assert revision.startswith(f"refused: {NAME} at v2 is not completely in the cache")


def test_data_is_fetched_and_code_is_not_asked_for(resolve):
    data = {
        "config.json": b"{}",
        "model.safetensors.index.json": b"{}",
        "model-00001-of-00001.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "tokenizer.model": b"pieces",
        "vocab.txt": b"words",
        "merges.txt": b"pairs",
        "chat_template.jinja": b"template",
    }
    others = (
        "modeling_tiny.py",
        "pytorch_model.bin",
        "model.pt",
        "model.ckpt",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.gguf",
        "README.md",
        "run.sh",
        "consolidated.safetensors",
        "original/model.safetensors",
        "onnx/config.json",
    )
    with serve(NAME, data | dict.fromkeys(others, b""), token="hf_secret") as (address, asked):
        *_, bare = resolve(NAME, HF_ENDPOINT=address, HF_TOKEN="hf_secret", NO_WEIGHTS="1")
        asked_first, there_first = list(asked), {path.name for path in Path(bare).iterdir()}
        *_, folder = resolve(NAME, HF_ENDPOINT=address, HF_TOKEN="hf_secret")
    assert not [path for path, _ in asked_first if path.endswith(".safetensors")]
    assert there_first == {name for name in data if not name.endswith(".safetensors")}
    found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert found == data
    assert {token for path, token in asked if NAME in path} == {"hf_secret"}
    assert not [path for path, _ in asked if any(path.endswith(name) for name in others)]
    assert resolve(NAME, HF_HUB_OFFLINE="1")[-1] == folder


def test_what_the_hub_refuses(resolve):
    with serve(NAME, {"config.json": b"{}"}) as (address, _):
        unknown, revision = resolve("org/unknown", f"{NAME}@v9", HF_ENDPOINT=address)
    assert unknown.startswith(f"refused: there is no model org/unknown on {address}, or it is")
    assert revision.startswith(f"refused: {NAME} has no revision 'v9'; name one of its branches")
    with serve(NAME, {}, error="GatedRepo") as (address, _):
        [gated] = resolve(NAME, HF_ENDPOINT=address)
    assert gated == (
        f"refused: {NAME} is gated; accept its terms at {address}/{NAME} "
        "and set HF_TOKEN to your token"
    )
    [silent] = resolve(NAME, HF_ENDPOINT=address)  # the server has stopped
    assert silent == (
        f"refused: {NAME} at main is not completely in the cache and {address} does not answer; "
        "check the network, or give a local folder"
    )


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "org/../x", "org/na me", "org/name@", "@x", ""])
def test_what_is_not_a_hub_id(name):
    with pytest.raises(WorkhorseError, match="is not a hub id"):
        resolve_model(name)


def test_two_revisions():
    with pytest.raises(WorkhorseError, match="disagree; give only one"):
        resolve_model("org/name@a", revision="b")
