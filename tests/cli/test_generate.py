import io
import json
import sys
from dataclasses import replace

import pytest

from workhorse.cli.main import main
from workhorse.cli.sampling import read_prompts, speed, with_sampling
from workhorse.cli.verbs.generate import _with_strings
from workhorse.generate import GenerationConfig, TokenLogprob
from workhorse.model.convert import save
from workhorse.model.load import load
from workhorse.tokenizers import BytesConfig, CharactersConfig, WordsConfig, train_tokenizer


def generate(capsys, *arguments: str) -> tuple[str, str]:
    """The output of a successful `workhorse generate` on stdout and stderr."""
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr()


def test_json_result(run_folder, capsys):
    out, _ = generate(
        capsys, str(run_folder), "--prompt", "ab", "--seed", "3", "--max-new-tokens", "9", "--json"
    )
    result = json.loads(out)
    assert result["tokens"] == len(result["token_ids"]) == 9
    assert isinstance(result["text"], str)
    assert result["finish_reason"] == "length"
    assert result["tokens_per_second"] > 0 < result["prompt_seconds"]
    assert (result["prompt"], result["prompt_tokens"], result["seed"]) == ("ab", 2, 3)


def test_text_goes_to_stdout_and_the_rest_to_stderr(run_folder, capsys):
    arguments = [str(run_folder), "--prompt", "ab", "--seed", "3", "--max-new-tokens", "9"]
    result = json.loads(generate(capsys, *arguments, "--json")[0])
    text = result["text"]
    out, err = generate(capsys, *arguments)
    assert out == text + "\n"
    assert err.startswith(f"{result['execution']}\n9 tokens, ")
    assert result["execution"].startswith("decode: ")
    assert " tokens/s after 0." in err
    assert err.endswith(" s for the prompt, stopped by length, seed 3\n")
    assert generate(capsys, *arguments, "--stream")[0] == text + "\n"


@pytest.mark.parametrize("more", [[], ["--stream"]])
def test_a_seed_that_was_drawn_is_told_and_gives_the_text_again(run_folder, capsys, more):
    arguments = [str(run_folder), "--prompt", "ab", "--max-new-tokens", "9", *more]
    out, err = generate(capsys, *arguments)
    seed = err.strip().rpartition(", seed ")[2]
    assert generate(capsys, *arguments, "--seed", seed)[0] == out
    assert "seed" not in generate(capsys, *arguments, "--temperature", "0")[1]


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "warning"),
    [
        (
            (WordsConfig(), "a b"),
            "a cat, a dog",
            "the tokenizer has no token for 3 words of the prompt ('cat', ',', 'dog'), so the "
            "model cannot tell them from other unknown words; use words of its training data",
        ),
        ((CharactersConfig(), "ab"), "aé", "no token for 1 character of the prompt ('é'), so "),
        ((BytesConfig(), ""), "é", ""),
    ],
)
def test_unknown_words_of_prompts_are_named_once(
    run_folder, tmp_path, capsys, monkeypatch, *, tokenizer, prompt, warning
):
    config, known = tokenizer
    decoder = load(run_folder, execution="reference").decoder
    save(decoder, tmp_path / "words", tokenizer=train_tokenizer(config, [known]))
    arguments = [str(tmp_path / "words"), "--max-new-tokens", "2"]
    _, err = generate(capsys, *arguments, "--prompt", prompt, "--prompt", prompt)
    assert warning in err
    assert err.count("warning: ") == bool(warning)
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    assert main(["chat", *arguments]) == 0
    assert warning in capsys.readouterr().err


def test_a_text_file_is_one_prompt(run_folder, capsys, tmp_path):
    (tmp_path / "one.txt").write_text("ab\ncd\n")
    arguments = [str(run_folder), "--prompt-file", str(tmp_path / "one.txt"), "--seed", "1"]
    out, _ = generate(capsys, *arguments, "--max-new-tokens", "4", "--json")
    assert json.loads(out)["prompt"] == "ab\ncd"
    streamed, _ = generate(capsys, *arguments, "--max-new-tokens", "4", "--stream")
    assert streamed == json.loads(out)["text"] + "\n"


def test_a_file_of_json_lines_is_a_prompt_a_line(run_folder, capsys, tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text('{"prompt": "ab"}\n\n{"prompt": "c\\nd\u2028", "id": 7}\n')
    arguments = [str(run_folder), "--prompt", "x", "--prompt-file", str(file)]
    out, _ = generate(capsys, *arguments, "--max-new-tokens", "2", "--json")
    prompts = [completion["prompt"] for completion in json.loads(out)["completions"]]
    assert prompts == ["x", "ab", "c\nd\u2028"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_from_an_editor_of_windows_is_its_text(tmp_path, name):
    content = b"ab\r\ncd\r\n" if name == "a.txt" else b'{"prompt": "ab\\r\\ncd"}\r\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert read_prompts((), tmp_path / name) == ["ab\r\ncd"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.txt", b"\xff", "a.txt is not UTF-8: bad byte at offset 0"),
        ("a.txt", b"x" * 11, "a.txt is larger than 10 bytes"),
        ("a.txt", None, "a.txt: No such file"),
        ("a.jsonl", b"\n", "a.jsonl is empty; write a line"),
        ("a.jsonl", b'\n{"p": x}', "jsonl:2 is not valid JSON: Expecting value at column 7\n"),
        ("a.jsonl", b"[1]", "a.jsonl:1"),
        (
            "a.jsonl",
            b'{"a": 1}',
            'a.jsonl:1: "prompt" is missing or not a string; correct or remove the line',
        ),
    ],
)
def test_a_broken_file_of_prompts_is_one_line(
    run_folder, capsys, tmp_path, monkeypatch, *, name, content, line
):
    monkeypatch.setattr("workhorse.cli.sampling.LARGEST_FILE", 10)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["generate", str(run_folder), "--prompt-file", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_a_lone_surrogate_in_a_prompt_is_one_line(run_folder, capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud800"}')
    assert main(["generate", str(run_folder), "--prompt-file", str(tmp_path / "a.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--length-penalty", "2"], "option of beam search; set beams to 2 or more, or omit it"),
        (
            ["--beams", "3", "--stream"],
            "--beams and --stream conflict: beam search has no output before",
        ),
        (["--temp", "0.5"], "--temperature"),
        (["--kernel", "flex"], "'flex' is not one of 'auto', 'eager', 'sdpa'"),
    ],
)
def test_flags_that_cannot_be_name_those_that_can(run_folder, capsys, flags, line):
    assert main(["generate", str(run_folder), "--prompt", "a", *flags]) == 2
    assert line in capsys.readouterr().err


def test_several_prompts_and_samples(run_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    arguments = [str(run_folder), "--prompt", "ab", "--prompt", "-", "--samples", "2"]
    out, _ = generate(capsys, *arguments, "--max-new-tokens", "4", "--seed", "5", "--json")
    result = json.loads(out)
    completions = result["completions"]
    assert [c["prompt"] for c in completions] == ["ab", "ab", "from stdin", "from stdin"]
    assert [c["seed"] for c in completions] == [5, 6, 5, 6]
    assert result["tokens"] == sum(c["tokens"] for c in completions)
    assert "text" not in result
    out, _ = generate(capsys, str(run_folder), "--prompt", "ab", "--prompt", "c", "--beams", "2")
    assert out.startswith("--- 1 of 2, after 'ab'\n")


def test_logprobs_and_beams_reach_the_result(run_folder, capsys):
    arguments = [str(run_folder), "--prompt", "ab", "--max-new-tokens", "3", "--json"]
    both = ["--logprobs", "2", "--prompt-logprobs", "0"]
    result = json.loads(generate(capsys, *arguments, *both)[0])
    entry = result["logprobs"][0]
    assert len(result["prompt_logprobs"]) == result["prompt_tokens"] - 1
    assert len(entry["top"]) == 2
    assert entry["logprob"] <= entry["top"][0][1] < 0
    tokens = load(run_folder).text
    for token, text in [(entry["token"], entry["text"]), *((t, w) for t, _, w in entry["top"])]:
        assert text == tokens.pieces([97, token])[1].text
    assert json.loads(generate(capsys, *arguments, "--beams", "2")[0])["score"] < 0


def test_a_token_of_a_padded_embedding_has_a_logprob_and_no_text(run_folder):
    model = load(run_folder)
    padded = model.text.vocab_size
    entry = TokenLogprob(97, -1.0, ((padded, -0.5), (97, -1.0)))
    (shown,) = _with_strings([entry], model.encode("b"), model)
    assert shown["top"] == [(padded, -0.5, None), (97, -1.0, "a")]


def test_the_models_own_sampling_options_are_told_and_flags_win(run_folder, capsys):
    model = replace(load(run_folder), sampling={"temperature": 0.6, "top_k": 5})
    flags = {"temperature": None, "top_k": 3}
    config = with_sampling(GenerationConfig(top_k=3), model, flags)
    assert config == GenerationConfig(temperature=0.6, top_k=3)
    told = "generation_config.json: temperature=0.6; flags override it\n"
    assert capsys.readouterr().err == told


def test_the_name_of_a_special_token_stops_at_it(run_folder):
    model = load(run_folder)
    options = {"logit_bias": {model.text.eos_id: 1e6}, "max_new_tokens": 3}
    assert len(model.generate("a", stop_tokens=(), **options).tokens) == 3
    stopped = model.generate("a", stop_tokens=(), stop=("<|eos|>",), **options)
    assert (stopped.text, stopped.finish_reason) == ("", "eos")


def test_guesses_are_told_of_and_change_nothing(run_folder, capsys):
    arguments = [str(run_folder), "--prompt", "abababab", "--temperature", "0", "--json"]
    plain = json.loads(generate(capsys, *arguments, "--max-new-tokens", "12")[0])
    assert "proposed" not in plain
    for more in ([], ["--draft", str(run_folder)]):
        speculating = [*arguments, "--max-new-tokens", "12", "--speculate", "3", *more]
        result = json.loads(generate(capsys, *speculating)[0])
        assert result["text"] == plain["text"]
        assert 0 <= result["accepted"] <= result["proposed"]
    assert result["accepted"] == result["proposed"] > 0  # a model's guesses for itself are right
    streamed, _ = generate(capsys, *[a for a in speculating if a != "--json"], "--stream")
    assert streamed == plain["text"] + "\n"


def test_bias_by_token_id(run_folder, capsys):
    arguments = [str(run_folder), "--prompt", "ab", "--max-new-tokens", "3", "--temperature", "0"]
    out, _ = generate(capsys, *arguments, "--logit-bias", "120=1e4", "--logit-bias", "97=-5")
    assert out == "xxx\n"


def test_a_full_context_is_explained(run_folder, capsys):
    arguments = [str(run_folder), "--prompt", "x" * 30, "--ignore-eos"]
    _, err = generate(capsys, *arguments)
    assert "\n3 tokens, " in err
    assert "note: the context is full; continue past it with --truncate left" in err
    _, err = generate(capsys, *arguments, "--truncate", "left")
    assert "\n128 tokens, " in err


def test_an_empty_prompt_begins_a_text(run_folder, capsys):
    out, _ = generate(capsys, str(run_folder), "--prompt", "", "--max-new-tokens", "2", "--json")
    assert json.loads(out)["prompt_tokens"] == 1  # the eos token, as before a new document


def test_a_preset_says_that_its_weights_are_random(capsys, monkeypatch):
    from workhorse import models
    from workhorse.models import preset

    small = preset("gpt2").replace(n_layers=1, vocab_size=300)
    monkeypatch.setattr("workhorse.model.load.preset", {"gpt2": small}.get)
    assert "gpt2" in models.preset_names()
    out, err = generate(capsys, "gpt2", "--prompt", "ab", "--seed", "1", "--max-new-tokens", "3")
    assert err.startswith("warning: gpt2 is a preset: its weights are random")
    again, _ = generate(capsys, "gpt2", "--prompt", "ab", "--seed", "1", "--max-new-tokens", "3")
    assert out == again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--top-p", "2"], "top_p=2 is not a probability; choose 0 < top_p <= 1"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1 is negative"),
        (
            ["--prompt", "a", "--beams", "2", "--temperature", "0.5"],
            "temperature=0.5 would have no",
        ),
        (["--prompt", "x" * 33], "the prompt has 33 tokens and the context is 32; shorten it"),
        (["--prompt", "a", "--logit-bias", "x=1"], "'x=1' is not a bias; write ID=VALUE"),
        (["--prompt", "a", "--device", "warp"], "device=warp is not a device"),
        ([], "no prompt is given; use --prompt TEXT"),
        (["--prompt", "-", "--prompt", "-"], "stdin can be read only once"),
        (["--prompt", "a", "--logprobs", "2"], "--logprobs only appear in the JSON result"),
        (["--prompt", "a", "--stream", "--json"], "--stream prints one completion"),
        (
            ["--prompt", "a", "--stream", "--batch-size", "2"],
            "--stream prints one completion; remove --batch-size (see",
        ),
        (
            ["--prompt", "a", "--stream", "--prompt", "b", "--json", "--n-samples", "2"],
            "remove --json, --n-samples and give one prompt, not 2 (see",
        ),
        (
            ["--prompt", "a", "--logit-bias", "5000=3"],
            "token id 5000 of logit_bias is not in the vocabulary of 260; choose 0 to 259",
        ),
        (
            ["--prompt", "a", "--logit-bias", "5=1", "--logit-bias", "5=2"],
            "token 5 is given twice; keep one",
        ),
        (["--prompt", "a", "--draft", "."], "a draft has no effect with speculate=0"),
    ],
)
def test_wrong_usage_is_one_line(run_folder, capsys, arguments, message):
    arguments = [str(run_folder) if argument == "." else argument for argument in arguments]
    assert main(["generate", str(run_folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_without_a_tokenizer_the_refusal_is_all_that_is_said(run_folder, capsys, tmp_path):
    save(load(run_folder, execution="reference").decoder, tmp_path / "bare")
    assert main(["generate", str(tmp_path / "bare"), "--prompt", "a"]) == 2
    line = f"workhorse: {tmp_path}/bare has no tokenizer; put tokenizer files beside the weights\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt3", "there is no folder, hub id or preset 'gpt3'; did you mean 'gpt"),
        (
            "tuned-hf",
            "preset 'tuned-hf'; check the path (workhorse models list shows the presets)\n",
        ),
        (".", "is not a run directory"),
        ("texts/a.txt", "texts/a.txt is a file; give the folder of its model"),
    ],
)
def test_a_wrong_model_is_one_line(run_folder, capsys, monkeypatch, model, message):
    monkeypatch.chdir(run_folder.parent)
    assert main(["generate", model, "--prompt", "a"]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert message in err


def test_the_help_tells_the_library_s_defaults(capsys):
    assert main(["generate", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    config = GenerationConfig()
    for name in ("max_new_tokens", "temperature", "truncate"):
        option = "--" + name.replace("_", "-")
        text = out[out.index(option) :]
        assert f"[default: {getattr(config, name)}]" in text[: text.index("--", 2) + 200]


def test_the_speed_is_that_of_decoding():
    """The prompt's forward pass gives the first new token, and its time is reported separately."""
    found = speed([5, 3, 1], seconds=4.0, prompt_seconds=1.0)
    assert found == {"tokens_per_second": 2.0, "prompt_seconds": 1.0}
    assert speed([1, 1], 2.0, 2.0)["tokens_per_second"] is None


@pytest.mark.parametrize("way", [[], ["--beams", "2"], ["--samples", "2", "--batch-size", "2"]])
def test_the_prompts_of_every_batch_are_timed(run_folder, capsys, way, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    arguments = ["--prompt", "ab", "--prompt", "c", "--max-new-tokens", "3", "--json", *way]
    result = json.loads(generate(capsys, str(run_folder), *arguments)[0])
    batches = 2 if "--batch-size" in way else 1
    assert result["prompt_seconds"] == batches
