"""`workhorse tokenizer`: results, and one-line errors."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workhorse.cli.main import main
from workhorse.data import Document
from workhorse.data.config import StdlibConfig
from workhorse.tokenizers import (
    BpeConfig,
    CharactersConfig,
    SpecialTokensConfig,
    load_tokenizer,
    train_tokenizer,
)

TEXT = "The lazy dog jumps over the quick fox.\n" * 50


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    (tmp_path / "texts" / "b.txt").write_text("naïve 東京\n" * 5)
    return tmp_path / "texts"


def test_train_then_report(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["tokenizer", "train", str(corpus), "--vocab-size", "300", "--out", str(out)]) == 0
    assert "bpe, 300 tokens" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    files = [str(corpus / "a.txt"), str(corpus / "b.txt")]
    assert main(["tokenizer", "report", str(out), *files]) == 0
    assert "round trip        exact" in capsys.readouterr().out
    assert main(["tokenizer", "report", str(out), *files, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == len((TEXT + "naïve 東京\n" * 5).encode())
    assert report["bytes_per_token"] > 1.5
    assert report["changed_documents"] == 0


@pytest.mark.parametrize(
    "algorithm",
    ["bpe", "byte_fallback_bpe", "wordpiece", "unigram", "characters", "words", "bytes"],
)
def test_every_algorithm_and_its_settings(
    algorithm: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tokenizer", "train", "--out", str(tmp_path / "out"), "--algorithm", algorithm]
    if algorithm != "bytes":
        arguments += [str(corpus), "--vocab-size", "320"]
    assert main([*arguments, "--set", "special.eos=</end>", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    loaded = load_tokenizer(tmp_path / "out")
    assert result["fingerprint"] == loaded.fingerprint
    assert result["vocab_size"] == loaded.vocab_size <= 320
    assert result["special_tokens"]["</end>"] == loaded.eos_id


def test_a_vocabulary_that_stays_smaller_is_told(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    train = ["tokenizer", "train", str(corpus), "--json", "--out", out, "--vocab-size"]
    assert main([*train, "4096"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["missing_tokens"] == 4096 - result["vocab_size"] > 0
    assert f"{result['missing_tokens']:,} fewer than requested" in printed.err
    assert main([*train, "300"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["missing_tokens"] == 0
    assert printed.err == ""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    special = SpecialTokensConfig(bos=None, eos="<|eos|>", pad=None, chat=())
    tokenizer = train_tokenizer(BpeConfig(vocab_size=260, special=special), ["the the the"])
    tokenizer.save(tmp_path / "small")
    return tmp_path / "small"


def test_encode_shows_each_piece_and_decode_takes_the_ids(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", "encode", str(small), "the é\x1b<|eos|>", "--allow-special"]) == 0
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    expected = ["'the'", "' '", r"'\xc3'", r"'\xa9'", r"'\x1b'", "* '<|eos|>'"]
    assert lines == [*expected, "tokens, 14 bytes"]
    assert main(["tokenizer", "encode", str(small), "the é <|eos|>", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer(small)
    assert result["ids"] == tokenizer.encode("the é <|eos|>")
    assert not any(piece["special"] for piece in result["pieces"])
    assert bytes.fromhex("".join(piece["bytes"] for piece in result["pieces"])).decode() == (
        "the é <|eos|>"
    )
    ids = [str(number) for number in result["ids"]]
    assert main(["tokenizer", "decode", str(small), *ids]) == 0
    assert capsys.readouterr().out == "the é <|eos|>\n"


def test_encode_counts_the_bytes_of_unknown_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(CharactersConfig(), ["To be Zo"]).save(tmp_path)
    assert main(["tokenizer", "encode", str(tmp_path), "To be Zoë"]) == 0
    assert capsys.readouterr().out.endswith("9 tokens, 10 bytes\n")
    assert main(["tokenizer", "encode", str(tmp_path), "\udcff"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_encode_and_decode_read_stdin(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(verb: str, stdin: bytes, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return (main(["tokenizer", verb, str(small), *options]), *capsys.readouterr())

    code, out, _ = run("encode", b"the\n", "--json")
    ids = json.loads(out)["ids"]
    assert (code, load_tokenizer(small).decode(ids)) == (0, "the\n")
    eos = load_tokenizer(small).eos_id
    assert run("decode", f"[{ids[0]}, {eos}]".encode())[1] == "the<|eos|>\n"
    assert run("decode", f"{ids[0]} {eos}".encode(), "--skip-special")[1] == "the\n"
    escape = load_tokenizer(small).encode("\x1b[2J")
    assert run("decode", str(escape).encode())[1] == "\x1b[2J\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("decode", str(escape).encode())[1] == "␛[2J\n"
    for verb, stdin, line in (
        ("encode", b"caf\xe9", "stdin is not UTF-8: bad byte at offset 3"),
        ("decode", b"1 two", "'two' is not a token id"),
        ("decode", b"1" * 5000, "is too large for a token id"),
        ("decode", b"9999", "token id 9999 is not in the vocabulary of 260"),
    ):
        code, out, err = run(verb, stdin)
        assert (code, out, line in err, err.count("\n")) == (2, "", True, 1)


def test_a_run_and_a_model_folder_stand_for_their_tokenizer(
    run_folder: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", "encode", str(run_folder), "ab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == [97, 98]
    (small / "tokenizer").mkdir()  # must not be loaded instead
    assert load_tokenizer(small).vocab_size == 260


def test_a_tokenizer_is_replaced_and_nothing_else_is(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    train = ["tokenizer", "train", str(corpus), "--vocab-size"]
    assert main([*train, "300", "--out", str(out)]) == 0
    assert "; replaced" not in capsys.readouterr().out
    assert main([*train, "290", "--out", str(out)]) == 0
    assert "; replaced the previous tokenizer\n" in capsys.readouterr().out
    assert load_tokenizer(out).vocab_size == 290
    assert main([*train, "300", "--out", str(corpus)]) == 2
    assert "has other files and no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["CORPUS"], "bpe needs --vocab-size, such as 4096 for a small corpus"),
        (["--vocab-size", "300"], "no FILES to train bpe on; give files, or - for stdin"),
        (["CORPUS", "--vocab-size", "200"], "vocab_size: 200 is too small"),
        (["CORPUS", "--vocab-size", "260"], "vocab_size=260 is too small for the bytes"),
        (["CORPUS", "--vocab-size", "300", "--set", "digit=1"], "did you mean 'digits'?"),
        (["CORPUS", "--vocab-size", "300", "--set", "digits"], "'digits' is not a setting"),
        (["CORPUS", "--vocab-size", "300", "--set", "kind=unigram"], "use --algorithm"),
        (["CORPUS", "--vocab-size", "300", "--set", "vocab_size=400"], "use --vocab-size"),
        (["CORPUS", "--vocab-size", "many"], "'many' is not a whole number"),
        (["nowhere.txt", "--vocab-size", "300"], "nowhere.txt"),
        (["CORPUS/empty", "--vocab-size", "300"], "the corpus has no text"),
        (["CORPUS/latin", "--vocab-size", "300"], "UTF-8"),
        (["CORPUS", "--algorithm", "spm"], "'spm' is not one of"),
        (
            ["--algorithm", "bytes", "--vocab-size", "300"],
            "--vocab-size does not apply to bytes, which always has 256 tokens",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str],
    line: str,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (corpus / "empty").mkdir()
    (corpus / "empty" / "e.txt").write_bytes(b"")
    (corpus / "latin").write_bytes(b"caf\xe9")
    if arguments[0] == "CORPUS":
        (corpus / "latin").unlink()
    arguments = [argument.replace("CORPUS", str(corpus)) for argument in arguments]
    out = tmp_path / "out"
    assert main(["tokenizer", "train", *arguments, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert line in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not out.exists()


def test_a_bad_file_is_refused_before_any_text_is_read(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    (tmp_path / "z.txt").write_text(TEXT, "utf-16")
    monkeypatch.setattr("workhorse.data.read_documents", None)
    arguments = [str(corpus), str(tmp_path / "z.txt"), "--vocab-size", "300"]
    assert main(["tokenizer", "train", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("z.txt is UTF-16, not UTF-8; convert it to UTF-8\n")


def test_a_report_without_a_tokenizer_or_texts_is_one_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", "report", str(corpus), str(corpus)]) == 2
    assert "merges.txt; choose a folder with such files" in capsys.readouterr().err
    main(["tokenizer", "train", "--algorithm", "bytes", "--out", str(tmp_path / "out")])
    assert main(["tokenizer", "report", str(tmp_path / "out")]) == 2
    assert "no FILES to measure on" in capsys.readouterr().err


def test_the_built_in_corpus_is_trained_on_and_measured_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    def read_documents(source: StdlibConfig, split: str) -> Iterator[Document]:
        asked.append((source.kind, split))
        yield Document("abc", "some text")

    monkeypatch.setattr("workhorse.data.read_documents", read_documents)
    out = str(tmp_path / "out")
    assert main(["tokenizer", "train", "stdlib", "--algorithm", "characters", "--out", out]) == 0
    assert main(["tokenizer", "report", out, "stdlib"]) == 0
    assert asked == [("stdlib", "train"), ("stdlib", "validation")]
    assert "9 bytes, 2 words" in capsys.readouterr().out
