"""Files that are not UTF-8 text give an error with their type and a remedy, before any work."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workhorse.data import DataConfig, check_sources, iterate_documents, prepare, read_documents
from workhorse.data.config import source_of
from workhorse.data.files import encoding_of, kind_of
from workhorse.data.preparation import prepare_tokenizer
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import tokenizer_config

ENGLISH, GREEK = "It is a truth.\n" * 9, "Λίγος ύπνος, μικρή ζωή.\n" * 9
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return made.getvalue()


@pytest.mark.parametrize("text", [ENGLISH, GREEK])
@pytest.mark.parametrize(
    "encoding", ["UTF-16", "UTF-16-LE", "UTF-16-BE", "UTF-32", "UTF-32-LE", "UTF-32-BE"]
)
def test_encodings_are_recognised_with_a_mark_and_without(text: str, encoding: str) -> None:
    assert encoding_of(text.encode(encoding)) == encoding[:6]
    assert encoding_of(text.encode()) is None


def test_a_text_cut_inside_a_character_of_utf16_is_still_that() -> None:
    assert encoding_of(("a b c 😀").encode("UTF-16-LE")[:-2]) == "UTF-16"


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=50))
def test_text_is_never_taken_for_anything_else(text: str) -> None:
    head = f"text {text}".encode()
    assert encoding_of(head) is None
    assert kind_of(head) is None


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (PNG, "a PNG picture"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG picture"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "a PDF"),
        (b"%PDF-1.7 is the header of a PDF file\n", None),
        (b"GIF89a\x40\1\xf0\0\xf7\0\0", "a GIF picture"),
        (b"GIF89a is a format of pictures\n", None),
        (b"RIFF\x24\x08\0\0WAVEfmt ", "WAV audio"),
        (b"RIFF or WAVE, that is the question\n", None),
        (b"\0\0\0\x20ftypisom", "MP4 video"),
        (b"The ftyp box comes first\n", None),
        (b"PK\x03\x04\x14\0", "a ZIP archive"),
        (gzip.compress(b"text", mtime=0), "gzip data"),
        (tar(), "a tar archive"),
        (b"x" * 256 + b"mustard\n", None),
        (bytes(range(256)), "binary data"),
        (b"one\0two, which is a long line of text and a zero byte in it\n", None),
        (b"", None),
    ],
)
def test_kinds_are_recognised_by_their_first_bytes(content: bytes, kind: str | None) -> None:
    assert kind_of(content) == kind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text("text of a file\n")
    return tmp_path / "texts"


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("z.txt", ENGLISH.encode("UTF-16"), "z.txt is UTF-16, not UTF-8; convert it to UTF-8"),
        ("z.txt", ENGLISH.encode("UTF-16-LE"), "z.txt is UTF-16, not UTF-8; convert it to UTF-8"),
        (
            "z.png",
            PNG,
            "z.png is a PNG picture, not text; exclude it with data.corpus.glob='**/*.txt'",
        ),
        (
            "z.txt",
            PNG,
            "z.txt is a PNG picture, not text; exclude it with data.corpus.glob='**/*.md'",
        ),
        (
            "z.tar.gz",
            gzip.compress(tar(), mtime=0),
            "z.tar.gz is a tar archive, not text; exclude it with data.corpus.glob='**/*.txt'",
        ),
    ],
)
def test_a_file_of_a_folder_is_named_however_it_is_read(
    folder: Path, name: str, content: bytes, line: str, errors: str
) -> None:
    (folder / name).write_bytes(content)
    config = DataConfig(
        corpus={"kind": "folder", "path": folder, "errors": errors, "validation_fraction": 0}
    )
    for read in (check_sources, lambda config: list(iterate_documents(config))):
        with pytest.raises(WorkhorseError) as raised:
            read(config)
        assert str(raised.value) == f"{folder}/{line}"


def test_a_file_is_refused_before_a_tokenizer_is_trained_or_text_encoded(
    folder: Path, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "z.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    config = DataConfig(
        corpus={"kind": "mixture", "sources": {"x": {"kind": "folder", "path": folder}}}
    )
    monkeypatch.setattr("workhorse.data.preparation.iterate_documents", None)
    remedy = r"exclude it with data\.corpus\.sources\.x\.glob='\*\*/\*\.txt'"
    with pytest.raises(WorkhorseError, match=remedy):
        prepare_tokenizer(tokenizer_config({"kind": "bpe", "vocab_size": 300}), config, tmp_path)
    with pytest.raises(WorkhorseError, match=remedy):
        prepare(config, tokenizer, tmp_path / "data")
    assert tokenizer.encoded_texts == 0


def test_a_bad_byte_near_the_beginning_is_found_by_the_first_look(folder: Path) -> None:
    (folder / "z.txt").write_bytes("Zoë".encode("latin-1"))
    corpus = {"kind": "folder", "path": folder, "validation_fraction": 0}
    line = (
        r"z\.txt: byte 0xeb at offset 2 is not UTF-8; convert the file to UTF-8, or set data\.corp"
    )
    with pytest.raises(WorkhorseError, match=line):
        check_sources(DataConfig(corpus=corpus))
    check_sources(DataConfig(corpus=corpus | {"errors": "replace"}))


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("texts/z.txt", b"Zo\xeb", "is not UTF-8; convert the file to UTF-8$"),
        ("texts/z.png", PNG, "is a PNG picture, not text; move it out of the folder$"),
        ("z.png", PNG, "is a PNG picture, not text; name a text file$"),
        (
            "z.jsonl",
            '{"text": "a"}\n'.encode("UTF-16"),
            "is UTF-16, not UTF-8; convert it to UTF-8",
        ),
        ("z.jsonl", b'{"txt": "a"}\n', r"rename the field with the text \(did you mean 'txt'\?\)$"),
        ("z.jsonl", b'{"text": "\\ud800"}\n', "lone surrogate .*; correct the line$"),
    ],
)
def test_a_command_without_a_recipe_is_advised_no_key_of_one(
    folder: Path, name: str, content: bytes, remedy: str
) -> None:
    path = folder.parent / name
    path.write_bytes(content)
    with pytest.raises(WorkhorseError, match=remedy):
        list(read_documents(source_of(folder if path.parent == folder else path), "train"))
