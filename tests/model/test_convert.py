"""Conversion from a run to transformers, to our own format and back gives the same model."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import workhorse
from tests.parity.reference import quiet
from workhorse.cli.main import main
from workhorse.config.base import read_yaml
from workhorse.errors import WorkhorseError
from workhorse.model.convert import Format, convert
from workhorse.run import train
from workhorse.tokenizers import (
    BytesConfig,
    SpecialTokensConfig,
    WordsConfig,
    train_tokenizer,
)
from workhorse.train import Recipe, with_init

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
WITH_CONVOLUTIONS = next(file for file in RECIPES if file.stem == "shakespeare-char")
LEAVING = [
    file
    for file in RECIPES
    if file != WITH_CONVOLUTIONS
    and file.stem != "decoder-2017"  # transformers has no decoder with its positions
    and not any(line.startswith(("init:", "  rollouts:")) for line in file.read_text().splitlines())
]
"""Recipes that train on text from random weights, and that other programs can represent."""
TEXT = "Models of runs are exported for other programs, and loaded again."


def logits(path: Path) -> torch.Tensor:
    model = workhorse.load(path)
    with torch.no_grad():
        return model.decoder(torch.tensor([model.encode(TEXT)]))


def assert_same_model(path: Path, original: Path) -> None:
    """Assert bitwise equal weights and close logits: weights at other addresses round otherwise."""
    found, expected = (workhorse.load(one).decoder.state_dict() for one in (path, original))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    torch.testing.assert_close(logits(path), logits(original))


def test_there_and_back(run_folder: Path, tmp_path: Path) -> None:
    there = convert(run_folder, tmp_path / "hf", "hf")
    assert there.parameters == sum(
        p.numel() for p in workhorse.load(run_folder).decoder.parameters()
    )
    convert(tmp_path / "hf", tmp_path / "ours", "workhorse")
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    for step in ("hf", "ours", "again"):
        assert_same_model(tmp_path / step, run_folder)


def test_transformers_reads_what_a_run_became(run_folder: Path, tmp_path: Path) -> None:
    architecture = convert(run_folder, tmp_path / "hf", "hf").architecture
    with quiet():
        theirs, info = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", output_loading_info=True
        )
        tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == architecture
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ours = workhorse.load(run_folder)
    assert tokenizer(TEXT)["input_ids"] == ours.encode(TEXT)
    with torch.no_grad():
        found = theirs(torch.tensor([ours.encode(TEXT)])).logits
    torch.testing.assert_close(found, logits(run_folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", ["hf", "workhorse"])
def test_others_begin_a_text_where_training_did(
    to: Format, run_folder: Path, tmp_path: Path
) -> None:
    """Sequences begin with the previous document's eos, not with the untrained bos."""
    special = SpecialTokensConfig(pad=None, chat=("<|user|>", "<|end|>"))
    tokenizer = train_tokenizer(BytesConfig(special=special), [])
    run = replace(workhorse.load(run_folder, execution="reference"), tokenizer=tokenizer)
    convert(run, tmp_path / "out", to)
    written = workhorse.load(tmp_path / "out")
    assert written.start == run.start == tokenizer.eos_id == 257
    assert written.encode("") == run.encode("")
    assert written.encode(TEXT) == run.encode(TEXT)
    if to == "hf":
        with quiet():
            assert hf.AutoTokenizer.from_pretrained(tmp_path / "out").bos_token_id == run.start


@pytest.mark.parametrize("to", ["hf", "workhorse"])
def test_the_type_of_the_weights(to: str, run_folder: Path, tmp_path: Path) -> None:
    convert(run_folder, tmp_path / "half", to, dtype="bfloat16")
    convert(workhorse.load(run_folder), tmp_path / "from a model", to, dtype="bfloat16")
    for name in ("half", "from a model"):
        assert workhorse.load(tmp_path / name).decoder.final_norm.weight.dtype == torch.bfloat16
    with pytest.raises(WorkhorseError, match="dtype=q8_0 needs --to gguf, not hf"):
        convert(run_folder, tmp_path / "other", "hf", dtype="q8_0")


def test_gguf(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    notes: list[str] = []
    convert(run_folder, tmp_path / "m.gguf", "gguf", dtype="float16", notify=notes.append)
    from gguf import GGUFReader

    assert {tensor.name for tensor in GGUFReader(tmp_path / "m.gguf").tensors} >= {
        "token_embd.weight",
        "blk.0.attn_q.weight",
    }
    with pytest.raises(WorkhorseError, match="exists; choose another file"):
        convert(run_folder, tmp_path / "m.gguf", "gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for to in ("gguf", "gguf-lora"):  # before the model is read
        with pytest.raises(WorkhorseError, match=r"writing GGUF needs .* pip install .*\[gguf\]"):
            convert(tmp_path / "none", tmp_path / "other.gguf", to)


def test_the_verb_says_the_class(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(run_folder), str(tmp_path / "hf"), "--to", "hf"]) == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'hf'}: ")
    assert line.endswith(f" parameters as {written['architectures'][0]}, float32")


def test_the_verb(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "hf")
    assert main(["convert", str(run_folder), target, "--to", "hf", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["path"], result["format"]) == (target, "hf")
    assert main(["convert", str(run_folder), target, "--to", "hf"]) == 2
    assert "exists and is not empty; choose another folder" in capsys.readouterr().err
    assert main(["convert", str(run_folder), f"{target}/config.json", "--to", "hf"]) == 2
    assert "config.json is a file; choose another name for the folder" in capsys.readouterr().err
    assert main(["convert", str(run_folder), str(tmp_path / "q.gguf"), "--to", "hf"]) == 2
    assert "q.gguf ends in .gguf, but --to hf writes a folder" in capsys.readouterr().err
    assert not (tmp_path / "q.gguf").exists()
    assert main(["convert", str(run_folder), str(tmp_path / "other")]) == 2
    assert "give --to hf, workhorse, gguf" in capsys.readouterr().err
    assert main(["generate", target, "--prompt", "a", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("to", ["hf", "workhorse", "gguf"])
def test_a_link_to_nothing_stays(to: Format, run_folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nothing")
    with pytest.raises(WorkhorseError, match=r"link (is a dangling link|exists); .*choose ano"):
        convert(run_folder, link, to)
    assert link.is_symlink()


def test_a_decoder_trained_by_hand_is_saved_and_loaded(run_folder: Path, tmp_path: Path) -> None:
    model = workhorse.load(run_folder, execution="reference")
    with torch.no_grad():
        model.decoder.final_norm.weight.add_(0.5)  # the training
    folder = workhorse.save(model.decoder, tmp_path / "mine", tokenizer=model.tokenizer)
    again = workhorse.load(folder)
    tokens = torch.tensor([model.encode(TEXT)])
    with torch.no_grad():
        expected = model.decoder.eval()(tokens)
        torch.testing.assert_close(again.decoder(tokens), expected, atol=1e-5, rtol=1e-5)
    assert again.encode(TEXT) == model.encode(TEXT)
    assert not torch.equal(logits(folder), logits(run_folder))


@pytest.mark.parametrize("name", ["q_proj", "activation"])
def test_a_replaced_module_is_not_saved(run_folder: Path, tmp_path: Path, name: str) -> None:
    """Its weights would be missing after loading, or the config's module would be restored."""
    decoder = workhorse.load(run_folder).decoder
    workhorse.save(decoder.config.build("eager"), tmp_path / "eager")  # the kernel is not saved
    place, module = next(
        (path, module) for path, module in decoder.named_modules() if path.endswith(f".{name}")
    )
    decoder.set_submodule(place, torch.nn.Sequential(module))
    with pytest.raises(WorkhorseError, match=rf"{place} is Sequential, but the config builds"):
        workhorse.save(decoder, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_saving_loses_nothing(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = workhorse.load(run_folder)
    folder = workhorse.save(model.decoder, tmp_path / "mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(WorkhorseError, match="mine exists and is not empty; choose another folder"):
        workhorse.save(model.decoder, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(WorkhorseError, match=r"needs a Decoder or a Model, not a ModuleList"):
        workhorse.save(model.decoder.layers, tmp_path / "other")  # pyright: ignore[reportArgumentType]
    small = model.config.replace(vocab_size=200).build()
    with pytest.raises(
        WorkhorseError, match="has 260 tokens, but the decoder has logits for only 200"
    ):
        workhorse.save(small, tmp_path / "other", tokenizer=model.tokenizer)
    word: Any = "x"
    with pytest.raises(WorkhorseError, match="'x' is not a Tokenizer"):
        workhorse.save(model.decoder, tmp_path / "other", tokenizer=word)

    def broken(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(type(model.tokenizer), "save", broken)
    with pytest.raises(WorkhorseError, match=r"cannot write .*other: .*the disk is gone"):
        workhorse.save(model.decoder, tmp_path / "other", tokenizer=model.tokenizer)
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("texts", "run")] == [
        "mine"
    ]


def quick(recipe: Path, texts: Path, **train_changes: object) -> Recipe:
    """A shipped recipe with a small model and a few lines of text."""
    fields = read_yaml(recipe)
    assert isinstance(fields, dict)
    (block,) = fields["model"]["blocks"].values()
    block["attention"] |= {"n_heads": 4} | ({"n_kv_heads": 2} if "stdlib" in recipe.stem else {})
    block["feed_forward"]["d_ff"] = 48
    fields["model"] |= {"d_model": 32, "n_layers": 2}
    fields["data"]["corpus"] = {"kind": "text", "path": str(texts)}
    fields["tokenizer"] |= {"vocab_size": 300} if "stdlib" in recipe.stem else {}
    sizes = {"steps": 6, "batch_size": 2, "seq_len": 16, "samples": None, "eval_every": None}
    fields["train"] |= {"schedule": {"kind": "constant"}} | sizes | train_changes
    return Recipe.from_dict(fields)


@pytest.mark.parametrize(
    ("to", "said"),
    [("hf", "no transformers class can represent"), ("gguf", "llama.cpp cannot compute")],
)
def test_a_model_with_convolutions_stays(to: Format, said: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXT * 20)
    train(quick(WITH_CONVOLUTIONS, texts, steps=1), tmp_path / "run")
    with pytest.raises(WorkhorseError, match=rf"{said} .*convolution is given, not null"):
        convert(tmp_path / "run", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", LEAVING, ids=lambda file: file.stem)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_shipped_recipe_trains_can_leave(dtype: str, file: Path, tmp_path: Path) -> None:
    """Export to transformers and GGUF, also from an unfinished run, and back: the same model.

    Without convolutions, which neither format supports.
    """
    pytest.importorskip("gguf")
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"def f_{n}(x):\n    return x + {n * 7}\n" for n in range(300)))
    run = tmp_path / "run"
    recipe = quick(file, texts, dtype=dtype, checkpoint_every=3)
    recipe.model["blocks"]["main"].pop("convolution", None)
    train(recipe, run)
    shutil.rmtree(run / "checkpoints" / "step-00000006")  # as if the run had been interrupted
    ours = workhorse.load(run, kernel="eager")
    text = "def f_12(x):\n    return"
    tokens = torch.tensor([ours.encode(text)])
    with torch.no_grad():
        expected = ours.decoder(tokens)

    classes = {"stdlib": "StableLmForCausalLM", "nanogpt": "GPT2LMHeadModel"}
    expected_class = classes.get(file.stem.partition("-")[0], "Qwen3ForCausalLM")
    assert convert(run, tmp_path / "hf", "hf").architecture == expected_class
    with quiet():
        theirs, info = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", output_loading_info=True
        )
        tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert tokenizer(text)["input_ids"] == tokens[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-5, rtol=1e-5)

    convert(run, tmp_path / "m.gguf", "gguf", notify=lambda _: None)
    convert(tmp_path / "m.gguf", tmp_path / "again", "hf", notify=lambda _: None)
    for copy in ("hf", "m.gguf", "again"):
        again = workhorse.load(tmp_path / copy, kernel="eager")
        assert again.encode(text) == ours.encode(text)
        with torch.no_grad():
            torch.testing.assert_close(again.decoder(tokens), expected)
        assert again.text.decode(tokens[0].tolist()) == text


def test_all_end_tokens_go_into_a_gguf_file(run_folder: Path, tmp_path: Path) -> None:
    model = replace(workhorse.load(run_folder, device="cpu"), stop_tokens=(1, 4))
    for name, source in (("m.gguf", model), ("plain.gguf", replace(model, tokenizer=None))):
        convert(source, tmp_path / name, "gguf", notify=list)
        again = workhorse.load(tmp_path / name, device="cpu", notify=list)
        assert set(again.stop_tokens) >= {1, 4}


def test_a_model_is_written_without_its_tokenizer(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = workhorse.load(run_folder, execution="reference").decoder
    words = train_tokenizer(WordsConfig(), ["a b"])
    source = str(workhorse.save(decoder, tmp_path / "words", tokenizer=words))
    command = ["convert", source, str(tmp_path / "m.gguf")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.endswith("write the model without the tokenizer (--no-tokenizer)\n")
    for name, to in (("m.gguf", "gguf"), ("hf", "hf"), ("again", "workhorse")):
        target = str(tmp_path / name)
        assert main(["convert", source, target, "--to", to, "--no-tokenizer"]) == 0
        again = workhorse.load(target, execution="reference", notify=list)
        assert again.tokenizer is None
        weights = again.decoder.state_dict()
        assert all(torch.equal(weights[key], one) for key, one in decoder.state_dict().items())
    with pytest.raises(WorkhorseError, match="the adapter as it is; remove dtype"):
        convert(source, tmp_path / "adapter", "peft", tokenizer=False)


def test_a_gguf_file_is_a_model_everywhere(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "m.gguf"
    convert(run_folder, file, "gguf", notify=lambda _: None)
    assert_same_model(file, run_folder)
    assert workhorse.load(file, quantize="int8").decoder is not None
    assert main(["generate", str(file), "--prompt", "a", "--max-new-tokens", "2", "--json"]) == 0
    data = str(tmp_path / "texts")
    assert main(["evaluate", str(file), "--data", data, "--json"]) == 0
    for to in ("hf", "workhorse"):
        assert main(["convert", str(file), str(tmp_path / to), "--to", to]) == 0
        assert_same_model(tmp_path / to, run_folder)
    assert main(["convert", str(file), str(tmp_path / "n.gguf")]) == 0  # --to by the suffix
    assert_same_model(tmp_path / "n.gguf", run_folder)
    capsys.readouterr()
    with pytest.raises(
        WorkhorseError, match="contains its tokenizer, but training needs a folder; create"
    ):
        with_init(
            {
                "name": "tuned",
                "init": str(file),
                "model": {},
                "data": {"corpus": {"kind": "folder", "path": data}},
                "train": {"steps": 1, "batch_size": 1, "seq_len": 8},
            }
        )


def test_a_saved_model_begins_a_text_as_the_run_did(run_folder: Path, tmp_path: Path) -> None:
    model = workhorse.load(run_folder)
    again = workhorse.load(workhorse.save(model, tmp_path / "copy"))
    assert again.encode("") == model.encode("")
    assert again.generate("", seed=1, max_new_tokens=6) == model.generate(
        "", seed=1, max_new_tokens=6
    )


@pytest.mark.parametrize("stop", [5, "ab", ["a"], [1.5], [True], [-1], [10**6]])
def test_what_ends_a_text_is_ids_of_the_vocabulary(
    stop: Any, run_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkhorseError, match=r"^stop_tokens(=| are ).*; "):
        workhorse.save(workhorse.load(run_folder), tmp_path / "out", stop_tokens=stop)
    assert not (tmp_path / "out").exists()
