import gzip
import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workhorse.data import DataConfig, Document, files, iterate_documents, read_documents, records
from workhorse.data import documents as documents_module
from workhorse.data.documents import HASHES, hash_of, threshold
from workhorse.errors import WorkhorseError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")


def read(split: str = "train", **corpus: object) -> list[Document]:
    return list(read_documents(DataConfig(corpus=corpus).corpus, split, key="data.corpus"))


def texts(split: str = "train", **corpus: object) -> list[str]:
    return [document.text for document in read(split, **corpus)]


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# One text file


@settings(max_examples=25)
@given(st.text(min_size=1, max_size=300), st.sampled_from([0.1, 0.5, 0.05]))
def test_a_text_is_cut_at_a_fraction_of_its_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, fraction: float
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    train = "".join(texts(kind="text", path=path, validation_fraction=fraction))
    held = "".join(texts("validation", kind="text", path=path, validation_fraction=fraction))
    assert train == text[: int((1 - fraction) * len(text))]
    assert train + held == text


def test_the_default_cut_is_that_of_character_level_shakespeare(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 100 + "12345")
    (train,) = texts(kind="text", path=tmp_path / "a.txt")
    assert len(train) == int(0.9 * 1005)


def test_a_text_may_have_a_validation_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("held out")
    corpus = {"kind": "text", "path": tmp_path / "a.txt", "validation": tmp_path / "b.txt"}
    assert texts(**corpus) == ["train"]
    assert texts("validation", **corpus) == ["held out"]


@settings(max_examples=50)
@given(st.text("ab|-\n", max_size=60), st.sampled_from(["|", "--", "-|-", "\n"]))
def test_documents_of_a_text_are_what_a_separator_divides(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str
) -> None:
    """The file is read in blocks of 3 characters, so separators cross their ends."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text + separator)
    corpus = {"kind": "text", "path": path, "documents": separator}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", 3)
        found = texts(validation_fraction=0, **corpus)
        splits = texts(**corpus) + texts("validation", **corpus)
    assert found == [one for one in (text + separator).split(separator) if one.strip()]
    assert sorted(splits) == sorted(found)


def test_documents_of_a_text_can_be_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"Hi. | Hello.\r\n\r\n  \nBye. | Bye.")
    corpus = {"kind": "text", "path": path, "documents": "lines"}
    assert texts(validation_fraction=0, **corpus) == ["Hi. | Hello.", "Bye. | Bye."]
    assert len(texts(**corpus)) == len(texts("validation", **corpus)) == 1
    (tmp_path / "b.txt").write_text("One line.")
    assert texts("validation", validation=tmp_path / "b.txt", **corpus) == ["One line."]


def test_a_separator_must_occur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = {"kind": "text", "path": tmp_path / "a.txt", "documents": "---"}
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    refused = r"characters of \S*a.txt do not contain data.corpus.documents='---'; use a string"
    with pytest.raises(WorkhorseError, match=f"^8 {refused}"):
        texts(validation_fraction=0, **corpus)
    for typed, remedy in {"line": "did you mean 'lines'", r"\n\n": "in double quotes"}.items():
        with pytest.raises(WorkhorseError, match=remedy):
            texts(validation_fraction=0, **{**corpus, "documents": typed})
    monkeypatch.setattr(records, "LONGEST", 5)  # also if a document would fill the memory
    (tmp_path / "a.txt").write_text("one---two, three")
    with pytest.raises(WorkhorseError, match=f"^10 {refused}"):
        texts(validation_fraction=0, **corpus)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, lambda content: content])
def test_compressed_files_are_read_whatever_their_name(tmp_path: Path, compress) -> None:
    text = "naïve café ☕\r\n" * 1000
    (tmp_path / "a").write_bytes(compress(text.encode()))
    assert texts(kind="text", path=tmp_path / "a", validation_fraction=0) == [text]


def test_the_standard_input_can_be_read_again_and_again(
    monkeypatch: pytest.MonkeyPatch, piped: None
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"0123456789")))
    assert texts(kind="text", path="-") == ["012345678"]
    assert texts("validation", kind="text", path="-") == ["9"]


def test_the_standard_input_may_be_jsonl(monkeypatch: pytest.MonkeyPatch, piped: None) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "one"}\n')))
    assert texts(kind="jsonl", path="-", validation_fraction=0) == ["one"]


def test_a_terminal_is_not_a_corpus(monkeypatch: pytest.MonkeyPatch, piped: None) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(WorkhorseError, match="a terminal; pipe text into it"):
        texts(kind="text", path="-")


@pytest.fixture
def piped() -> Iterator[None]:
    """Clear the cached copy of the standard input before and after the test."""
    files._stdin_file.cache_clear()
    yield
    if files._stdin_file.cache_info().currsize:
        files._stdin_file().close()
    files._stdin_file.cache_clear()


@pytest.mark.parametrize("at", [0, 7, files.BLOCK_BYTES - 1, files.BLOCK_BYTES, 2_000_000])
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(tmp_path: Path, at: int) -> None:
    content = bytearray(("é" * 1_100_000).encode())
    content[at] = 0xFF
    (tmp_path / "a.txt").write_bytes(content)
    expected = at - at % 2 if at % 2 else at  # the broken character begins one byte before
    with pytest.raises(WorkhorseError, match=rf"a.txt: byte 0x\w\w at offset {expected} is not"):
        texts(kind="text", path=tmp_path / "a.txt")


def test_a_text_that_ends_inside_a_character_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("abcé".encode()[:-1])
    with pytest.raises(
        WorkhorseError, match="byte 0xc3 at offset 3 is not UTF-8; convert the file to"
    ):
        texts(kind="text", path=tmp_path / "a.txt")


def test_bad_bytes_are_replaced_where_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xffcd")
    assert texts(kind="text", path=tmp_path / "a.txt", errors="replace", validation_fraction=0) == [
        "ab\ufffdcd"
    ]


# Long documents


@given(st.text(alphabet="ab \n\r", max_size=200), st.integers(1, 20))
def test_long_texts_come_in_pieces_that_add_up(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PIECE_CHARS", limit)
        pieces = list(documents_module._in_pieces("name", [text[:50], text[50:]]))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= limit for piece in pieces)
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1) or not text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] or not text


def test_pieces_are_cut_where_tokenizers_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PIECE_CHARS", 20)
    text = "one two\nthree\n\n four five six seven"
    pieces = [piece.text for piece in documents_module._in_pieces("name", [text])]
    assert pieces == ["one two\n", "three\n\n four five si", "x seven"]


# Folders


def test_a_folder_is_its_visible_files_by_path(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.txt", "a/b.md", ".hidden", ".git/config", "empty.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    everything = {"kind": "folder", "path": tmp_path, "validation_fraction": 0}
    assert texts(**everything) == ["a/b.md", "a/z.txt", "b.txt"]
    assert [document.name for document in read(**everything)] == ["a/b.md", "a/z.txt", "b.txt"]
    assert texts(**everything, glob="**/*.txt") == ["a/z.txt", "b.txt"]


def test_held_out_files_stay_held_out_when_others_come(tmp_path: Path) -> None:
    corpus = {"kind": "folder", "path": tmp_path, "validation_fraction": 0.3}
    for index in range(200):
        (tmp_path / f"{index}.txt").write_text(f"text {index}")
    held = set(texts("validation", **corpus))
    assert held.isdisjoint(texts(**corpus))
    assert len(held) + len(texts(**corpus)) == 200
    assert 40 < len(held) < 80
    (tmp_path / "another.txt").write_text("another")
    assert held <= set(texts("validation", **corpus))


@pytest.mark.parametrize(
    ("names", "fraction", "held"),
    [
        ("bcde", 0.1, "c"),  # the hashes are 0.999, 0.31, 0.99 and 0.80 of the range
        ("abcde", 0.1, "a"),  # the hash is 0.097, below 0.1
        ("bd", 0.999, "d"),
        ("bd", 0.9995, "d"),  # both would be held out
    ],
)
def test_of_two_documents_or_more_each_split_gets_one(
    tmp_path: Path, names: str, fraction: float, held: str
) -> None:
    for name in names:
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "1.txt").write_text("")  # the smallest hash, 0.04, but no text
    corpus = {"kind": "folder", "path": tmp_path, "validation_fraction": fraction}
    assert texts("validation", **corpus) == [held]
    assert texts(**corpus) == [name for name in names if name != held]


@given(
    st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=3), max_size=12),
    st.floats(0, 0.999),
)
def test_the_share_asked_for_is_held_out_where_both_splits_get_some(
    records: list[str], fraction: float
) -> None:
    below = threshold(fraction, ((text, [text]) for text in records))
    asked = [text for text in records if hash_of(text) < fraction * HASHES]
    held = [text for text in records if hash_of(text) < below]
    if 0 < len(asked) < len(records) or fraction == 0:
        assert held == asked
    elif len(set(records)) > 1:
        assert 0 < len(held) < len(records)
        alone = set(held) if not asked else set(records) - set(held)
        assert len(alone) == 1


def test_no_more_is_read_to_share_out_documents_than_until_each_split_has_one() -> None:
    endless = ((str(number), [str(number)]) for number in itertools.count())
    assert threshold(0.1, endless) == 0.1 * HASHES


# Records


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)],
)
def test_json_lines_are_documents(tmp_path: Path, name: str, compress) -> None:
    lines = b'{"text": "one"}\n\n{"text": null}\n{"text": ""}\n{"text": "two \\u00e9", "id": 2}'
    (tmp_path / name).write_bytes(compress(lines))
    for path in (tmp_path / name, tmp_path):
        documents = read(kind="jsonl", path=path, validation_fraction=0)
        assert [(d.name, d.text) for d in documents] == [
            (f"{tmp_path / name}:1", "one"),
            (f"{tmp_path / name}:5", "two é"),
        ]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    table = pyarrow.table({"content": ["one", None, "", "two"], "id": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "a.parquet")
    parquet.write_table(table, tmp_path / "b.parquet")
    corpus = {"kind": "parquet", "text_field": "content", "validation_fraction": 0}
    assert texts(path=tmp_path / "a.parquet", **corpus) == ["one", "two"]
    assert texts(path=tmp_path, **corpus) == ["one", "two"] * 2


def test_equal_records_are_held_out_together(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{i % 50}"} for i in range(200)])
    corpus = {"kind": "jsonl", "path": path, "validation_fraction": 0.3}
    assert set(texts(**corpus)).isdisjoint(texts("validation", **corpus))
    assert len(texts("validation", **corpus)) in range(20, 120)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_of_a_few_records_one_is_held_out(tmp_path: Path, kind: str) -> None:
    words = ["one", "two", "", "three", "two"]  # the hash of "two" is the smallest: 0.25
    write_jsonl(tmp_path / "a.jsonl", [{"text": word} for word in words])
    parquet.write_table(pyarrow.table({"text": words}), tmp_path / "a.parquet")
    corpus = {"kind": kind, "path": tmp_path / f"a.{kind}"}
    assert texts("validation", **corpus) == ["two", "two"]
    assert texts(**corpus) == ["one", "three"]


def test_texts_of_a_mixture_come_source_after_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    second = write_jsonl(tmp_path / "b.jsonl", [{"text": "second"}, {"text": "third"}])
    sources = {
        "a": {"kind": "text", "path": tmp_path / "a.txt", "validation_fraction": 0},
        "b": {"kind": "jsonl", "path": second, "validation_fraction": 0},
    }
    config = DataConfig(corpus={"kind": "mixture", "sources": sources})
    assert list(iterate_documents(config)) == ["first", "second", "third"]
    assert list(iterate_documents(config, "validation")) == []


# Errors


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            b'{"text": "a"}\n{"text": \n',
            r"a\.jsonl:2 is not JSON: Expecting value at column 9; correct or remove the line",
        ),
        (
            b'{"text": ' + b"[" * 5000,
            r"a\.jsonl:1 is nested too deeply; correct or remove the line",
        ),
        (
            b'{"n": ' + b"9" * 5000 + b"}",
            r"a\.jsonl:1 is not JSON: Exceeds the limit .* conversion",
        ),
        (b"[1]\n", r"a\.jsonl:1 is not a JSON object"),
        (
            b'{"txt": "a"}\n',
            r"has no field 'text'; set data\.corpus\.text_field to another field \(did you mean",
        ),
        (b'{"text": 5}\n', "'text' is a int, not a string; correct it"),
        (b'{"text": "ok"}\n{"text": "\xff"}\n', "byte 0xff at offset 25 is not UTF-8"),
        (b'{"text": "\\ud800"}\n', r"has a lone surrogate \\ud800"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(WorkhorseError, match=line):
        texts(kind="jsonl", path=tmp_path / "a.jsonl", validation_fraction=0)


def test_bad_records_are_mended_where_asked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n{"text": "\\ud800x"}\n')
    corpus = {"kind": "jsonl", "path": tmp_path / "a.jsonl", "errors": "replace"}
    assert texts(**corpus, validation_fraction=0) == ["\ufffd", "?x"]


def write_parquet(path: Path, rows: list[bytes | None]) -> None:
    """Write bytes that are not UTF-8 into a string column, as some other writers do."""
    column = pyarrow.array(rows, pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(rows), column.buffers())
    parquet.write_table(pyarrow.table({"text": column}), path)


def test_a_parquet_row_that_is_not_utf8_is_named_or_mended(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["é".encode(), None, b"ab\xffcd"])
    corpus = {"kind": "parquet", "path": tmp_path / "a.parquet", "validation_fraction": 0}
    line = (
        r"a\.parquet:2: byte 0xff at offset 2 is not UTF-8; .*, or set data\.corpus\.errors=replace"
    )
    with pytest.raises(WorkhorseError, match=line):
        texts(**corpus)
    assert texts(**corpus, errors="replace") == ["é", "ab\ufffdcd"]


@pytest.mark.parametrize("kind", ["text", "folder", "jsonl", "parquet"])
def test_a_missing_path_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(WorkhorseError, match=r"missing.*check the path"):
        texts(kind=kind, path=tmp_path / "missing")


@pytest.mark.parametrize(
    ("corpus", "line"),
    [
        ({"kind": "text", "path": "/dev/zero"}, "is a pipe or device; name a file, or - for stdin"),
        ({"kind": "text", "path": "."}, "is a folder; name a file in it"),
        ({"kind": "folder", "path": "a.txt"}, "is not a folder; use kind: text for one file"),
        ({"kind": "folder", "path": "a.parquet"}, "use kind: parquet for one file"),
        ({"kind": "folder", "path": ".", "glob": ""}, "glob='' is not a valid pattern"),
        ({"kind": "jsonl", "path": "."}, "no .jsonl or .* file in .; name another folder"),
        ({"kind": "parquet", "path": "a.txt"}, "cannot read a.txt: .*; download it again"),
        ({"kind": "parquet", "path": "a.parquet"}, "a.parquet has no column 'text'"),
        (
            {"kind": "parquet", "path": "a.parquet", "text_field": "id"},
            r"column 'id' has the type int64, not string; set data\.corpus\.text_field to another "
            r"field \(known: id\)",
        ),
        (
            {"kind": "parquet", "path": "twice.parquet"},
            "twice.parquet has 2 columns named 'text'; rename",
        ),
        ({"kind": "text", "path": "cut.gz"}, "cut.gz is damaged: .*; download it again"),
        ({"kind": "text", "path": "cut.zst"}, "cut.zst is damaged: .*; download it again"),
    ],
)
def test_wrong_files_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: dict, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("plain")
    parquet.write_table(pyarrow.table({"id": [1]}), "a.parquet")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(twice, "twice.parquet")
    Path("cut.gz").write_bytes(gzip.compress(b"text" * 1000)[:-9])
    damaged = bytearray(zstandard.compress(bytes(range(256)) * 1000))
    damaged[-20:] = b"x" * 20
    Path("cut.zst").write_bytes(damaged)
    with pytest.raises(WorkhorseError, match=line):
        texts(**corpus)


@pytest.mark.parametrize(
    ("package", "corpus"),
    [
        ("zstandard", {"kind": "text", "path": "a.zst"}),
        ("pyarrow", {"kind": "parquet", "path": "a.parquet"}),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, corpus: dict
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    Path("a.zst").write_bytes(zstandard.compress(b"text"))
    Path("a.parquet").write_bytes(b"")
    with pytest.raises(WorkhorseError, match=r"pip install -e '.\[data\]'"):
        texts(**corpus)


@pytest.mark.parametrize(
    "kind",
    [pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.string_view(), pyarrow.null()],
)
def test_a_parquet_column_of_any_type_of_strings(tmp_path: Path, kind: pyarrow.DataType):
    rows = [None, None] if kind == pyarrow.null() else ["one", None, "two", "one"]
    column = pyarrow.array(rows, kind)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    source = DataConfig.from_dict(
        {"corpus": {"kind": "parquet", "path": str(tmp_path), "validation_fraction": 0}}
    ).sources
    found = [one.text for part in source.values() for one in read_documents(part, "train")]
    assert found == [row for row in rows if row]
