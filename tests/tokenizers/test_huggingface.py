"""Tokenizers in published folder layouts give the same ids and strings as AutoTokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizers.hf_files import write
from tests.tokenizers.hf_folders import FOLDERS, bare, llama3, llama_model
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import ChatTemplate, Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

Pair = tuple[Any, Tokenizer]

TEXTS = [
    "",
    " ",
    "Hello world",
    " leading",
    "  two and  two",
    "trailing  ",
    "a  b   c\n\n\nd\t e",
    "é 東京 ﬁ ① ½ 🦊👩\u200d👩\u200d👧 Москва हिन्दी e\u0301 ÀÉ \u00a0\u3000z",
    "user\nHello 12345 6\r\n",
    "\u2581 a\u2581b",
    "I'm sure we DON'T, you'LL see: 100 %.",
    "\n\nx\x00\x01\x7f",
    "<0x41> [UNK] <s",
    "x" * 50 + " " * 30 + "y",
]
_made: dict[str, tuple[Path, Pair]] = {}


def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Pair]]:
    """Return a function that writes a folder in FOLDERS and loads it, here and in transformers."""

    def folder(name: str) -> tuple[Path, Pair]:
        if name not in _made:
            path = write(FOLDERS[name](), tmp_path_factory.mktemp("hf") / "published")
            _made[name] = path, (theirs(path), load_tokenizer(path))
        return _made[name]

    return folder


@pytest.fixture(scope="session", params=list(FOLDERS))
def published(request: pytest.FixtureRequest, folder_of: Any) -> tuple[Path, Pair]:
    return folder_of(request.param)


def texts_with_tokens(reference: Any) -> list[str]:
    """Return strings with many names of added tokens, with and without spaces around them."""
    names = list(reference.added_tokens_encoder)
    names = names[:9] + names[-9:]
    laden = [name.join(["ab ", " cd", "", "e\n"]) for name in names]
    return [*laden, "".join(names), " ".join(names), "\n".join(names), "x" + "x".join(names)]


def check_same(reference: Any, ours: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = reference(text)["input_ids"]
        assert ours.encode_sequence(text, allow_special=True) == ids, text
        for skip in (False, True):
            decoded = reference.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special=skip) == decoded


def test_ids_and_texts_are_those_of_transformers(published: tuple[Path, Pair]) -> None:
    _, (reference, ours) = published
    check_same(reference, ours, TEXTS + texts_with_tokens(reference))


def test_typed_text_is_that_of_split_special_tokens(published: tuple[Path, Pair]) -> None:
    """Skips strings in which transformers still finds control tokens, such as Unigram pieces."""
    _, (reference, ours) = published
    controls = set(ours.special_tokens.values()) - {ours.unk_id}
    for text in TEXTS + texts_with_tokens(reference):
        ids = ours.encode(text)
        assert controls.isdisjoint(ids)
        split = reference(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        if controls.isdisjoint(split) and ours.roles.get("unk", "\0") not in text:
            assert ids == split


def test_special_tokens_are_those_of_transformers(published: tuple[Path, Pair]) -> None:
    _, (reference, ours) = published
    named = {f"{role}_token": token for role, token in ours.roles.items()}
    assert named == reference.special_tokens_map
    assert (ours.bos_id, ours.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    assert (ours.pad_id, ours.unk_id) == (reference.pad_token_id, reference.unk_token_id)
    assert ours.vocab_size == 1 + max(reference.get_vocab().values())


def test_what_transformers_saved_again_reads_the_same(
    published: tuple[Path, Pair], tmp_path: Path
) -> None:
    path, (reference, ours) = published
    reference.save_pretrained(tmp_path)
    shutil.copy(path / "config.json", tmp_path)
    again = load_tokenizer(tmp_path)
    check_same(theirs(tmp_path), again, TEXTS + texts_with_tokens(reference))
    assert again.encode_sequence(TEXTS[7]) == ours.encode_sequence(TEXTS[7])


def test_a_megabyte_of_text(folder_of: Any) -> None:
    text = "".join(TEXTS[1:]) * 3600
    assert len(text.encode()) > 1_000_000
    for name in ("llama 3", "llama 2"):
        _, (reference, ours) = folder_of(name)
        ids = reference(text)["input_ids"]
        assert ours.encode_sequence(text, allow_special=True) == ids
        assert ours.decode(ids) == reference.decode(ids)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ids_decode_and_stream_as_in_transformers(
    published: tuple[Path, Pair], data: st.DataObject
) -> None:
    """Ids as a model may produce them: incomplete characters, invalid bytes, leading spaces."""
    _, (reference, ours) = published
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=25))
    for skip in (False, True):
        whole = ours.decode(ids, skip_special=skip)
        assert whole == reference.decode(ids, skip_special_tokens=skip)
        stream = ours.stream(skip_special=skip)
        assert "".join(map(stream.push, ids)) + stream.finish() == whole


def test_byte_tokens_that_are_no_character(folder_of: Any) -> None:
    """A run of byte tokens is valid or not as a whole, so the stream waits for its end."""
    _, (reference, ours) = folder_of("llama 2")
    fox = [ours.token_id(f"<0x{byte:02X}>") for byte in "é🦊".encode()]
    for cut in range(len(fox) + 1):
        ids = [*fox[:cut], ours.token_id("a")]
        assert ours.decode(ids) == reference.decode(ids)
    stream = ours.stream()
    assert [stream.push(number) for number in [*fox, ours.token_id("a")]] == [*[""] * 6, "é🦊a"]


def test_the_same_files_go_back(published: tuple[Path, Pair], tmp_path: Path) -> None:
    path, (_, ours) = published
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    ours.save(tmp_path / "back", model_type=model_type)
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "config.json"}
    assert {file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()} == before


def test_what_we_save_reads_the_same_in_transformers(
    published: tuple[Path, Pair], tmp_path: Path
) -> None:
    """Saved in our own format, without a model and next to a model of another type."""
    _, (reference, ours) = published
    ours.save(tmp_path)
    assert load_tokenizer(tmp_path).encode_sequence(TEXTS[7]) == ours.encode_sequence(TEXTS[7])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    again = theirs(tmp_path)
    assert again.special_tokens_map == reference.special_tokens_map
    check_same(again, ours, TEXTS + texts_with_tokens(reference))
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint


def test_a_type_with_rules_of_its_own_is_refused(folder_of: Any, tmp_path: Path) -> None:
    _, (_, llama) = folder_of("llama 3")
    with pytest.raises(WorkhorseError, match="special rules for tokenizers of model type 'qwen2'"):
        llama.save(tmp_path / "qwen", model_type="qwen2")
    assert not (tmp_path / "qwen").exists()
    _, (_, qwen) = folder_of("qwen 3")
    qwen.save(tmp_path / "qwen", model_type="qwen2")
    (tmp_path / "qwen" / "config.json").write_text('{"model_type": "qwen2"}')
    check_same(theirs(tmp_path / "qwen"), qwen, TEXTS)


def test_a_native_tokenizer_can_begin_texts_with_bos(trained: Any, tmp_path: Path) -> None:
    for name in ("bpe", "byte_fallback_bpe", "unigram"):
        plain = trained(name)
        assert plain.encode_sequence("The fox") == plain.encode("The fox")
        ours = plain.with_prefix(plain.roles["bos"])
        assert ours.encode_sequence("The fox") == [plain.bos_id, *plain.encode("The fox")]
        folder = tmp_path / name
        ours.save(folder, model_type="llama")
        (folder / "config.json").write_text('{"model_type": "llama"}')
        reference = theirs(folder)
        texts = ["", "The fox, naïve 🦊 東京", " two  spaces ", f"a{ours.roles['eos']}b"]
        check_same(reference, ours, texts)


def test_named_templates_are_kept(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    files = bare()
    files["tokenizer_config.json"] = {"chat_template": templates}
    inline = write(files, tmp_path / "inline")
    wanted = {entry["name"]: entry["template"] for entry in templates}
    assert load_tokenizer(inline).chat_templates == theirs(inline).chat_template == wanted
    load_tokenizer(inline).save(tmp_path / "files")
    (tmp_path / "files" / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path / "files").chat_templates == wanted
    assert theirs(tmp_path / "files").chat_template == wanted
    load_tokenizer(write(bare(), tmp_path / "bare")).save(tmp_path / "files")
    assert load_tokenizer(tmp_path / "files").chat_templates == {}


def test_a_template_in_a_file_replaces_the_one_in_the_settings(tmp_path: Path) -> None:
    files = {**bare(), "tokenizer_config.json": {"chat_template": "old"}}
    files["chat_template.jinja"] = "new\r\nlines"
    folder = write(files, tmp_path)
    assert load_tokenizer(folder).chat_template == "new\r\nlines"
    chat = [{"role": "user", "content": "x"}]
    assert theirs(folder).apply_chat_template(chat, tokenize=False) == "new\nlines"
    assert ChatTemplate.of(load_tokenizer(folder)).render(chat) == "new\nlines"


DEEP = "[" * 100_000
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "deep settings": ({"tokenizer_config.json": '{"a": ' + DEEP}, "nested deeper than 64"),
    "deep definition": ({"tokenizer.json": '{"a": ' + DEEP}, "nested deeper than 64"),
    "many values": (
        {"tokenizer.json": '{"a": [' + "0," * 2_500_001 + "0]}"},
        "has more than 2500000 values",
    ),
    "large settings": ({"tokenizer_config.json": " " * 5_000_000}, "larger than 4194304 bytes"),
    "large template": ({"chat_template.jinja": "x" * 500_000}, "larger than 400000 bytes"),
    "long number": ({"tokenizer_config.json": '{"a": ' + "9" * 5000 + "}"}, "is not valid JSON"),
    "a list": ({"special_tokens_map.json": "[]"}, r"is \[\], not a JSON object"),
    "no token": (
        {"tokenizer_config.json": {"bos_token": {"x": 1}}},
        "special tokens have an invalid format",
    ),
    "number as token": (
        {"tokenizer_config.json": {"eos_token": 5}},
        "special tokens have an invalid format",
    ),
    "odd ids": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"one": {"content": "a"}}}},
        "special tokens have an invalid format",
    ),
    "a text as flag": (
        {"tokenizer_config.json": {"drop_leading_space": "no"}},
        "tokenizer_config.json: drop_leading_space='no' is not true or false; write true or false",
    ),
    "no list": (
        {"tokenizer_config.json": {"extra_special_tokens": 5}},
        "special tokens have an invalid format; write",
    ),
    "template name": (
        {"tokenizer_config.json": {"chat_template": [{"name": "../../x", "template": ""}]}},
        r"chat template name '\.\./\.\./x'",
    ),
    "empty definition": ({"tokenizer.json": "{}"}, "not a tokenizer.json"),
    "no model": (
        {"tokenizer.json": "{}", "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}},
        "not in the format of the tokenizers library",
    ),
    "a flag as normalizer": (
        {
            "tokenizer.json": {
                **json.loads(bare()["tokenizer.json"].to_str()),
                "normalizer": True,
            }
        },
        r"not in the format of the tokenizers library \(a value has the wrong type\)",
    ),
    "huge id": (
        {
            "tokenizer.json": {
                **json.loads(bare()["tokenizer.json"].to_str()),
                "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 2**31}},
            }
        },
        "a token id is above 2,097,152",
    ),
    "twice the text": (
        {
            "tokenizer.json": {
                **json.loads(bare()["tokenizer.json"].to_str()),
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                    "pair": [],
                    "special_tokens": {},
                },
            }
        },
        "inserts the input 2 times",
    ),
    "sentencepiece": (
        {"tokenizer.json": None, "tokenizer.model": b"\x0a\xff\xff\xff\xff\x0f" + b"\x80" * 999},
        "is not a SentencePiece model",
    ),
    "endless number": (
        {"tokenizer.json": None, "tokenizer.model": b"\x80" * 1_000_000},
        "is not a SentencePiece model",
    ),
    "long piece": (
        {
            "tokenizer.json": None,
            "tokenizer.model": b"\x0a\x84\x80\x40\x0a\x80\x80\x40" + b"a" * 2**20,
        },
        "is not a SentencePiece model",
    ),
    "merges": ({"tokenizer.json": None, "vocab.json": {"a": 0}, "merges.txt": "a b c"}, "merges"),
    "vocabulary": (
        {"tokenizer.json": None, "vocab.json": "[]", "merges.txt": ""},
        "not a JSON object",
    ),
    "nothing": ({"tokenizer.json": None}, "it has no tokenizer.json"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    changed, message = HOSTILE[name]
    files = {key: value for key, value in {**bare(), **changed}.items() if value is not None}
    folder = write(files, tmp_path)
    with pytest.raises(WorkhorseError, match=message) as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = write(bare(), tmp_path / "model")
    secret = tmp_path / name
    secret.write_bytes((folder / "tokenizer.json").read_bytes())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(WorkhorseError, match="is a link out of its folder"):
        load_tokenizer(folder)


def test_links_into_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs = write(llama3(), tmp_path / "models--a--b" / "blobs")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "additional_chat_templates").mkdir()
    (blobs / "more.jinja").write_text("{{ messages }}")
    for number, file in enumerate(sorted(blobs.iterdir())):
        name, up = file.name, Path("../../blobs")
        if name == "more.jinja":
            name, up = f"additional_chat_templates/{name}", Path("../../../blobs")
        (snapshot / name).symlink_to(up / f"{number:040x}")
        file.rename(blobs / f"{number:040x}")
    # Newer versions of the cache keep one copy for all repositories.
    moved, shared = blobs / f"{0:040x}", f"ab/ab{0:062x}"
    (tmp_path / "blobs" / "ab").mkdir(parents=True)
    moved.rename(tmp_path / "blobs" / shared)
    moved.symlink_to(f"../../blobs/{shared}")
    loaded = load_tokenizer(snapshot)
    assert loaded.bos_id == 420
    assert loaded.chat_templates["more"] == "{{ messages }}"


def test_a_sentencepiece_model_without_a_class_is_sentencepiece(tmp_path: Path) -> None:
    """The generic class of transformers would add no space."""
    import sentencepiece

    files = llama_model()
    folder = write({"tokenizer.model": files["tokenizer.model"]}, tmp_path)
    ours = load_tokenizer(folder)
    reference = sentencepiece.SentencePieceProcessor(model_proto=files["tokenizer.model"])
    for text in TEXTS:
        if "<s" not in text and "\x00" not in text:
            assert ours.encode(text) == reference.encode(text)
