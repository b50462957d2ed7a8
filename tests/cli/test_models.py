"""`workhorse models`: output as a table, as a config file, and as JSON."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from workhorse.checkpoints import RunDirectory
from workhorse.cli.main import main
from workhorse.model.convert import convert
from workhorse.model.model import describe
from workhorse.models import find_preset, preset, preset_names, search
from workhorse.nn import DecoderConfig


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["models", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_list_is_a_line_for_each_preset(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in printed(capsys, "list").splitlines() if line]
    assert [line.split()[0] for line in lines] == ["name", *preset_names()]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["gpt2"] == ["124M", "12", "768", "12", "3072", "50257", "1024"]
    assert rows["llama-2-70b"] == ["69.0B", "80", "8192", "64/8", "28672", "32000", "4096"]
    assert rows["mixtral-8x7b"][0] == "46.7B/12.9B"
    assert len({len(line) for line in lines}) == 1  # columns are aligned


def test_list_of_some_names_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = printed(capsys, "list", "Qwen3").split("\n\n")
    names = [[line.split()[0] for line in block.splitlines()] for block in blocks]
    assert names == [["name"], *search("qwen3")]
    assert [name for group in search("qwen3") for name in group] == [
        name for name in preset_names() if "qwen3" in name
    ]
    blocks = printed(capsys, "list", "mi").split("\n\n")[1:]
    assert [block.split()[0] for block in blocks] == [
        "mistral-7b-v0.1",
        "mixtral-8x7b",
        "phi-3-mini-4k",
    ]
    assert main(["models", "list", "gpt-5"]) == 2
    assert "no preset has 'gpt-5' in its name" in capsys.readouterr().err


def test_list_on_a_terminal_cuts_nothing_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    table = printed(capsys, "list")
    assert "…" not in table
    assert [line.split()[0] for line in table.splitlines() if line.strip()][1:] == preset_names()


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, "list", "--json"))["presets"]
    assert [row["name"] for row in rows] == preset_names()
    assert rows[preset_names().index("gemma-2b")] == {
        "name": "gemma-2b",
        "parameters": 2_506_172_416,
        "active_parameters": 2_506_172_416,
        "printed": "2B",
        "n_layers": 18,
        "d_model": 2048,
        "n_heads": 8,
        "n_kv_heads": 1,
        "head_dim": 256,
        "d_ff": 16384,
        "n_experts": None,
        "top_k": None,
        "expert_d_ff": None,
        "vocab_size": 256_000,
        "max_seq_len": 8192,
    }


@pytest.mark.parametrize("name", ["gpt3-1.3b", "falcon-40b", "gpt"])
def test_show_is_a_config_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert DecoderConfig.from_yaml(printed(capsys, "show", name)) == preset(name)


def test_show_says_counts_source_and_contradiction(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "gpt3-1.3b")
    assert "# gpt3-1.3b: 1,517,123,584 parameters (printed)\n" in out
    assert "# Printed count: 1.32B (does not agree; see the notes).\n" in out
    assert "# Source: 2005.14165 Table 2.1" in out
    assert "16 heads of 128 would give 1.316B" in " ".join(out.replace("#", " ").split())
    assert max(len(line) for line in out.splitlines()) <= 100


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(printed(capsys, "show", "llama-2-7b", "--json"))
    parameters = result["parameters"]
    assert parameters["total"] == find_preset("llama-2-7b").parameters
    assert parameters["total"] == sum(parameters.values()) - parameters["total"]
    assert parameters["head"] == 32000 * 4096
    assert (result["exactness"], result["printed"], result["agrees"]) == ("released", "7B", True)
    assert DecoderConfig.from_dict(result["config"]) == preset("llama-2-7b")


def test_show_of_a_mixture_says_what_works_on_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "deepseek-v3")
    assert "# Active per token: 37,552,297,472 parameters.\n" in out
    text = " ".join(out.replace("#", " ").split())
    assert "- 3 layers `dense`: 128 heads of 192, all keys, feed-forward 18432" in text
    assert "- 58 layers `sparse`: 128 heads of 192, all keys, 8 of 256" in text


def test_show_of_a_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", str(run_folder))
    assert DecoderConfig.from_yaml(out) == RunDirectory(run_folder).config
    assert f"# {run_folder}: 10,928 parameters\n" in out
    assert "# Stored as: run directory, step 1.\n# Weights: 0.0 MiB in float32.\n" in out
    assert "# Tokenizer: 260 tokens, 4 of them special, without a chat template, " in out
    assert "# Exports as: LlamaForCausalLM.\n" in out
    shutil.rmtree(run_folder / "checkpoints")
    assert "# Weights: none here.\n" in printed(capsys, "show", str(run_folder))


def test_show_of_what_convert_wrote(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(run_folder, tmp_path / "hf", "hf", dtype="bfloat16")
    convert(run_folder, tmp_path / "ours", "workhorse")
    found = json.loads(printed(capsys, "show", str(tmp_path / "hf"), "--json"))
    assert found["kind"] == "Hugging Face directory, model type llama"
    total = found["parameters"]["total"]
    assert found["weights"] == {"bytes": 2 * total, "types": {"bfloat16": 2 * total}}
    assert found["tokenizer"]["vocab_size"] == 260
    ours = json.loads(printed(capsys, "show", str(tmp_path / "ours"), "--json"))
    assert ours["weights"] == {"bytes": 4 * total, "types": {"float32": 4 * total}}
    assert DecoderConfig.from_dict(ours["config"]) == RunDirectory(run_folder).config
    (tmp_path / "hf" / "tokenizer.json").write_text("{")
    assert "# Tokenizer: cannot be read:" in printed(capsys, "show", str(tmp_path / "hf"))


def test_show_of_a_gguf_file(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    convert(run_folder, tmp_path / "m.gguf", "gguf", dtype="float16", notify=list)
    out = printed(capsys, "show", str(tmp_path / "m.gguf"))
    assert "# Stored as: GGUF file.\n# Weights: 0.0 MiB in float16 and float32.\n" in out
    assert "# Tokenizer: 260 tokens" in out
    assert DecoderConfig.from_yaml(out).n_layers == 1


def test_show_reads_no_weights(run_folder: Path, tmp_path: Path) -> None:
    """The weights need not exist: for a model on the hub they are not downloaded."""
    convert(run_folder, tmp_path / "hf", "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    found = describe(tmp_path / "hf")
    assert found["weights"] is None
    assert found["shape"]["n_layers"] == 1


def test_show_of_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "gpt-2"]) == 2
    line = "workhorse: there is no folder, hub id or preset 'gpt-2'; did you mean 'gpt2'?\n"
    assert capsys.readouterr().err == line
    assert main(["models", "show", "gemini"]) == 2
    remedy = "its shape is not published, see workhorse models table gemini\n"
    assert capsys.readouterr().err.endswith(remedy)
    assert main(["models", "show", str(tmp_path)]) == 2
    assert "is not a run directory: it has no recipe.yaml" in capsys.readouterr().err


def test_show_tells_of_each_kind_of_layer(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, "show", "gemma-3-27b")
    heads = "32 heads of 128, 16 key-value heads"
    lines = " ".join(page.replace("#", " ").split())
    assert "Shape: 62 layers of width 5376, vocabulary" in lines
    assert f"- 52 layers `local`: {heads}, window 1,024, feed-forward 21504." in lines
    assert "positions: RoPE (theta 10,000) in 52 of 62 layers, RoPE (theta 1,000" in lines
    assert f"- 10 layers `global`: {heads}, all keys, feed-forward 21504." in lines


def test_a_recipe_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine")
    assert main(["models", "show", str(tmp_path / "mine.yaml")]) == 2
    assert (
        "mine.yaml is a recipe, not a model; train it with workhorse train"
        in capsys.readouterr().err
    )


def test_table_of_systems(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "table").splitlines()
    assert max(map(len, lines)) <= 92
    columns = ["name", "year", "parameters", "wiring", "norm", "positions", "attention"]
    assert lines[0].split() == columns
    (llama,) = (line for line in lines if line.startswith("Llama 2 "))
    assert llama.split()[2:] == [
        "2023",
        "6.74B–69.0B",
        "pre-norm",
        "RMSNorm",
        "RoPE",
        "MHA,",
        "GQA",
    ]
    (gpt4,) = (line for line in lines if line.startswith("GPT-4 "))
    assert gpt4.split()[1:] == ["2023", *["—"] * 5]


def test_table_of_one_system_has_all_columns(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "table", "mpt-7b-storywriter")
    assert "positions     ALiBi (maximum bias 16)\n" in shown
    assert "context       65,536\n" in shown
    assert max(map(len, shown.splitlines())) <= 96
    (found,) = json.loads(printed(capsys, "table", "storywriter", "--json"))["systems"]
    assert found["presets"] == ["mpt-7b-storywriter"]
    assert found["scores"] == "clip 6"
    assert main(["models", "table", "gpt-5"]) == 2
    assert "no system is named 'gpt-5'" in capsys.readouterr().err
