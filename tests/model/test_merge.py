"""Merging models: the formulas in float64, what is written, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.conftest import MODEL
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.model.convert import save
from workhorse.model.load import load
from workhorse.model.merge import MergeRecipe, Parts, merge
from workhorse.model.model import Model
from workhorse.nn import Decoder, DecoderConfig
from workhorse.run import train
from workhorse.tokenizers import BytesConfig, Tokenizer, train_tokenizer
from workhorse.train import Recipe
from workhorse.transforms.adapters import add_adapter
from workhorse.transforms.lora import LoraConfig

SMALL = DecoderConfig.from_dict({**MODEL, "vocab_size": 300, "max_seq_len": 32})


def tensors(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def merged(
    method: dict[str, Any], parts: list[Tensor], weights: list[float], **more: Any
) -> Tensor:
    config = MergeRecipe.from_dict(
        {"method": method, "models": [{"model": "x"}] * len(parts)}
        | ({"base": "x"} if "base" in more else {})
    ).method
    return config.merge(Parts(parts, weights, more.get("base"), [*range(len(parts))]))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_linear_is_the_weighted_mean() -> None:
    a, b = tensors(2, 3, 4)
    close(merged({"kind": "linear"}, [a, b], [0.3, 0.5]), (0.3 * a.double() + 0.5 * b) / 0.8)
    unscaled = merged({"kind": "linear", "normalize": False}, [a, b], [0.3, 0.5])
    close(unscaled, 0.3 * a.double() + 0.5 * b)


def test_slerp_keeps_the_angle_and_the_ends() -> None:
    a, b = tensors(2, 40)
    a, b = a / a.norm(), b / b.norm()
    found = [merged({"kind": "slerp", "t": t}, [a, b], [1, 1]) for t in (0.0, 0.25, 1.0)]
    close(found[0], a.double())
    close(found[2], b.double())
    angle = torch.acos((a.double() * b).sum())
    close(found[1].norm(), torch.tensor(1.0).double())
    close(torch.acos((found[1].double() * a).sum()), angle / 4)
    nearly = a + 1e-4 * b
    close(merged({"kind": "slerp", "t": 0.5}, [a, nearly], [1, 1]), (a.double() + nearly) / 2)


def test_task_arithmetic_adds_changes() -> None:
    base, a, b = tensors(3, 5)
    found = merged({"kind": "task_arithmetic", "scale": 0.5}, [a, b], [0.3, 0.6], base=base)
    wide = base.double()
    close(found, wide + 0.5 * (0.3 * (a - wide) + 0.6 * (b - wide)))


def test_ties_by_hand() -> None:
    """Two of four elements are kept per model, and then one has a conflict of signs."""
    base = torch.zeros(4)
    a, b = torch.tensor([1.0, -4.0, 0.1, 1.5]), torch.tensor([2.0, 5.0, 0.2, -1.9])
    found = merged({"kind": "ties", "density": 0.5}, [a, b], [1.0, 1.0], base=base)
    # kept: a -> (0, -4, 0, 1.5), b -> (2, 5, 0, 0); the sign of element 1 is +, so only b counts
    close(found, torch.tensor([2.0, 5.0, 0.0, 1.5]).double())
    weighted = merged({"kind": "ties", "density": 0.5}, [a, b], [3.0, 1.0], base=base)
    close(weighted, torch.tensor([2.0, -4.0, 0.0, 1.5]).double())
    fewest = merged({"kind": "ties", "density": 0.1}, [a, b], [1.0, 1.0], base=base)
    close(fewest, torch.tensor([0.0, 5.0, 0.0, 0.0]).double())  # one per tensor


def test_dare_keeps_the_mean_and_is_reproducible() -> None:
    base = torch.zeros(200, 200)
    change = torch.ones(200, 200)
    dare = {"kind": "dare", "density": 0.3}
    found = merged(dare, [change], [1.0], base=base)
    assert set(found.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.3)}
    assert float(found.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(found, merged(dare, [change], [1.0], base=base))
    assert not torch.equal(found, merged({**dare, "seed": 1}, [change], [1.0], base=base))
    both = merged(dare, [change, change], [1.0, 1.0], base=base)
    assert float((both > 4).float().mean()) == pytest.approx(0.09, abs=0.02)  # independent masks
    signed = {**dare, "density": 1.0, "common_sign": True}
    a, b = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 2.0])
    added = merged(signed, [a, b], [1, 1], base=torch.zeros(2))
    close(added, torch.tensor([3.0, -3.0]).double())  # a sum, as in mergekit; TIES has the mean 1.5


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Three small LLaMAs with one tokenizer."""
    tokenizer = train_tokenizer(BytesConfig(), ())
    for name in "abc":
        torch.manual_seed(ord(name))
        save(SMALL.build(), tmp_path / name, tokenizer=tokenizer)
    return [str(tmp_path / name) for name in "abc"]


def weights(decoder: Decoder) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in decoder.named_parameters()}


@pytest.mark.parametrize("to", ["hf", "workhorse"])
def test_a_merged_model_is_loaded_with_its_tokenizer(
    folders: list[str], tmp_path: Path, to: Any
) -> None:
    recipe = MergeRecipe.from_dict({"models": [{"model": name} for name in folders[:2]]})
    result = merge(recipe, tmp_path / "out", to)
    assert (result.method, result.dtype, result.models) == ("linear", "float32", folders[:2])
    found = load(tmp_path / "out", execution="reference")
    assert found.tokenizer is not None
    first, second = (weights(load(name, execution="reference").decoder) for name in folders[:2])
    for name, weight in weights(found.decoder).items():
        close(weight, (first[name].double() + second[name]) / 2)


@pytest.mark.parametrize(
    ("can_chat", "of_a", "of_b", "differ"),
    [
        (False, ["<|eos|>"], ["<|end|>"], True),
        (False, [], ["<|end|>", "<|eos|>"], False),
        (True, [], ["<|end|>", "<|eos|>"], True),
        (True, [], ["<|eos|>"], False),
    ],
)
def test_a_base_without_a_template_keeps_that_of_the_models(
    can_chat: bool, of_a: list[str], of_b: list[str], differ: bool, tmp_path: Path
) -> None:
    """By default, the end of a document also ends a reply."""
    roles = train_tokenizer(BytesConfig(chat=True), ())
    plain = Tokenizer(roles.definition, roles.roles)
    for name, tokenizer in {"base": plain, "a": roles if can_chat else plain, "b": roles}.items():
        torch.manual_seed(ord(name[0]))
        ends = {"base": [], "a": of_a, "b": of_b}[name]
        stop = tuple(map(tokenizer.token_id, ends))
        save(SMALL.build(), tmp_path / name, tokenizer=tokenizer, stop_tokens=stop)
    recipe = MergeRecipe.from_dict(
        {
            "method": {"kind": "ties"},
            "base": str(tmp_path / "base"),
            "models": [{"model": str(tmp_path / name)} for name in "ab"],
        }
    )
    lines: list[str] = []
    merge(recipe, tmp_path / "out", "workhorse", notify=lines.append)
    speaker, other = ("a", "b") if can_chat else ("b", "a")
    line = f"{other} has another set of stop tokens; the merged model has {speaker}'s"
    assert [one.replace(f"{tmp_path}/", "") for one in lines] == [line] * differ
    found = load(tmp_path / "out", execution="reference")
    assert found.tokenizer is not None
    assert found.tokenizer.chat_template == roles.chat_template
    assert found.stop_tokens == tuple(map(roles.token_id, of_a if can_chat else of_b))


def test_a_model_with_an_adapter_is_refused(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adapted(*args: Any, **options: Any) -> Model:
        model = load(*args, **options)
        add_adapter(model.decoder, LoraConfig(rank=2))
        return model

    monkeypatch.setattr("workhorse.model.merge.load", adapted)
    recipe = MergeRecipe.from_dict({"models": [{"model": name} for name in folders]})
    with pytest.raises(WorkhorseError, match=r"is an adapter; .* workhorse convert .*a FOLDER"):
        merge(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_checkpoints_of_a_run_are_averaged(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text to learn; " * 60)
    train(
        Recipe.from_dict(
            {
                "name": "run",
                "model": MODEL,
                "tokenizer": {"kind": "bytes", "special": {"bos": "<|bos|>"}},
                "data": {
                    "corpus": {"kind": "text", "path": str(tmp_path / "text.txt")},
                    "bos": True,
                },
                "train": {
                    "steps": 6,
                    "batch_size": 2,
                    "seq_len": 16,
                    "checkpoint_every": 2,
                    "keep": 3,
                },
            }
        ),
        tmp_path / "run",
    )
    part = {"model": str(tmp_path / "run"), "checkpoints": 3}
    merge(MergeRecipe.from_dict({"models": [part]}), tmp_path / "out", "workhorse")
    run, out = (load(tmp_path / one, execution="reference") for one in ("run", "out"))
    assert out.prefix == run.prefix == (run.text.bos_id,)
    steps = [
        load(path, execution="reference").decoder
        for path in sorted((tmp_path / "run" / "checkpoints").iterdir())
    ]
    mean = load(tmp_path / "out", execution="reference").decoder
    for name, weight in weights(mean).items():
        close(weight, sum(weights(one)[name].double() for one in steps) / 3)
    more = MergeRecipe.from_dict({"models": [{**part, "checkpoints": 4}]})
    with pytest.raises(WorkhorseError, match="has 3 checkpoints, fewer than checkpoints=4"):
        merge(more, tmp_path / "more")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"models": []}, "there are no models"),
        ({"models": [{"model": "a"}], "method": {"kind": "ties"}}, "base=None does not fit ties"),
        ({"models": [{"model": "a"}], "base": "b"}, "base=b does not fit linear; remove it"),
        (
            {"models": [{"model": "a", "weight": 1}, {"model": "b", "weight": -1}]},
            "add up to 0",
        ),
        ({"models": [{"model": "a", "weight": float("nan")}]}, "nan is not a finite number"),
        (
            {"models": [{"model": "a"}], "base": "b", "method": {"kind": "ties", "density": 0}},
            "density",
        ),
        ({"models": [{"model": "a"}], "method": {"kind": "soup"}}, "soup"),
        (
            {"models": [{"model": "a", "weight": 2}, {"model": "b"}], "method": {"kind": "slerp"}},
            "slerp does not use weights",
        ),
    ],
)
def test_wrong_recipes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        MergeRecipe.from_dict(fields)
    assert "\n" not in str(raised.value)


def test_models_that_do_not_fit(folders: list[str], tmp_path: Path) -> None:
    def refused(names: list[str], message: str, **more: Any) -> None:
        fields = {"models": [{"model": one} for one in names]} | more
        recipe = MergeRecipe.from_dict(fields)
        with pytest.raises(WorkhorseError, match=re.escape(message)):
            merge(recipe, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    tokenizer = train_tokenizer(BytesConfig(), ())
    save(SMALL.replace(d_model=32).build(), tmp_path / "wide", tokenizer=tokenizer)
    refused([folders[0], str(tmp_path / "wide")], "d_model is 32, not 16; merge models that differ")
    refused(folders, "slerp merges two models, not 3", method={"kind": "slerp"})
    refused([str(tmp_path / "none")], "does not exist")
    refused([], "is not a run", models=[{"model": folders[0], "checkpoints": 2}])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    recipe = MergeRecipe.from_dict({"models": [{"model": folders[0]}]})
    with pytest.raises(WorkhorseError, match="exists and is not empty"):
        merge(recipe, tmp_path / "out")


BLOCK = MODEL["blocks"]["main"]
FUNCTIONS: dict[str, dict[str, Any]] = {
    "attention.n_heads is 4": {"attention": {"n_heads": 4}},
    "attention.position.theta is 500.0": {
        "attention": {"position": {"kind": "rope", "theta": 500}}
    },
    "attention.window is 4": {"attention": {"window": 4}},
    "feed_forward.activation is 'gelu'": {"feed_forward": {"activation": "gelu"}},
    "norm.eps is 0.1": {"norm": {"kind": "rms_norm", "eps": 0.1}},
}
"""Blocks with weights of equal shapes that compute other functions."""


@pytest.mark.parametrize("difference", FUNCTIONS)
def test_models_that_compute_different_functions(
    difference: str, folders: list[str], tmp_path: Path
) -> None:
    changes = {
        key: {**BLOCK[key], **change} if isinstance(BLOCK[key], dict) else change
        for key, change in FUNCTIONS[difference].items()
    }
    config = {**MODEL, "vocab_size": 300, "max_seq_len": 32, "blocks": {"main": BLOCK | changes}}
    save(DecoderConfig.from_dict(config).build(), tmp_path / "other")
    recipe = MergeRecipe.from_dict(
        {"models": [{"model": folders[0]}, {"model": str(tmp_path / "other")}]}
    )
    with pytest.raises(
        WorkhorseError, match=re.escape(f"different functions: layers.0.{difference}")
    ):
        merge(recipe, tmp_path / "out", notify=print)


MERGES = [["a", "b"], ["b", "c"]]
TOKENIZERS: dict[str, dict[str, Any]] = {
    "model": {"merges": MERGES[::-1]},
    "pre_tokenizer": {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
    "normalizer": {"normalizer": {"type": "Lowercase"}},
}


@pytest.mark.parametrize("part", TOKENIZERS)
def test_tokenizers_with_one_vocabulary(part: str, tmp_path: Path) -> None:
    for name, changes in {"one": {}, "other": TOKENIZERS[part]}.items():
        tokens = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc"])}
        bpe = {"type": "BPE", "vocab": tokens, "merges": changes.get("merges", MERGES)}
        parts = {"pre_tokenizer": None, "normalizer": None, "post_processor": None} | changes
        parts.pop("merges", None)
        definition = {"version": "1.0", "added_tokens": [], "decoder": None, "model": bpe, **parts}
        save(SMALL.build(), tmp_path / name, tokenizer=Tokenizer(json.dumps(definition)))
    recipe = MergeRecipe.from_dict(
        {"models": [{"model": str(tmp_path / name)} for name in ("one", "other")]}
    )
    with pytest.raises(WorkhorseError, match=f"differ in {part}; merge models with one tokenizer"):
        merge(recipe, tmp_path / "out")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("bfloat16", "float32"), "float32"),
        (("bfloat16", "float16"), "float32"),
        (("bfloat16", "bfloat16"), "bfloat16"),
    ],
)
def test_auto_is_a_dtype_that_rounds_no_model(
    dtypes: tuple[str, str], expected: str, tmp_path: Path
) -> None:
    """Differences that the weights do not depend on are named."""
    for name, dtype in zip("ab", dtypes, strict=True):
        longer = SMALL.replace(max_seq_len=32 if name == "a" else 64)
        save(longer.build().to(getattr(torch, dtype)), tmp_path / name)
    recipe = MergeRecipe.from_dict({"models": [{"model": str(tmp_path / one)} for one in "ab"]})
    lines: list[str] = []
    assert merge(recipe, tmp_path / "out", notify=lines.append).dtype == expected
    assert f"{tmp_path}/b has another max_seq_len; the merged model has {tmp_path}/a's" in lines
