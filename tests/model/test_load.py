"""`workhorse.load` and the model it returns."""

import dataclasses
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

import workhorse
from workhorse.data import DataConfig
from workhorse.errors import WorkhorseError
from workhorse.model.convert import Format, convert
from workhorse.model.model import Model, describe
from workhorse.models import preset
from workhorse.nn import Decoder, DecoderConfig
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, train_tokenizer
from workhorse.transforms.quantization import FormatName, quantize

TINY = DecoderConfig.from_dict(
    {
        "vocab_size": 300,
        "d_model": 16,
        "n_layers": 1,
        "max_seq_len": 32,
        "blocks": {
            "main": {
                "kind": "pre_norm",
                "norm": {"kind": "rms_norm"},
                "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
                "feed_forward": {"kind": "mlp", "d_ff": 32},
            }
        },
        "init": {"kind": "normal", "std": 0.5},
    }
)


@pytest.fixture
def model():
    """Builds a model like one of a run, trained on documents with or without bos and eos."""

    def make(*, bos: bool = False, eos: bool = True) -> Model:
        special = SpecialTokensConfig(bos="<|bos|>", eos="<|eos|>", pad=None, chat=())
        tokenizer = train_tokenizer(BytesConfig(special=special), [])
        data = DataConfig(corpus="stdlib", bos=bos, eos=eos)
        return Model("tiny", TINY.build().eval(), tokenizer, trained=True, data=data)

    return make


def test_a_text_begins_as_training_began_it(model):
    ids = {"bos": 256, "eos": 257}
    with_bos, with_eos, with_none = model(bos=True), model(), model(eos=False)
    assert with_bos.encode("a") == [ids["bos"], 97]
    assert with_bos.encode("") == [ids["bos"]]
    assert with_eos.encode("a") == [97]  # the prompt may be the middle of a document
    assert with_eos.encode("") == [ids["eos"]]
    assert with_none.encode("") == []
    assert (with_bos.start, with_eos.start, with_none.start) == (ids["bos"], ids["eos"], None)


def test_a_text_of_a_model_from_elsewhere_begins_at_bos_or_else_at_eos(model):
    """Sequences without added tokens start with bos, else eos, as in lm-evaluation-harness."""
    loaded = replace(model(), data=None)
    assert loaded.start == 256
    assert loaded.encode("a") == [97]
    assert loaded.encode("") == [256]
    few = train_tokenizer(BytesConfig(), [])
    assert replace(loaded, tokenizer=few).start == few.eos_id
    begun = replace(loaded, tokenizer=loaded.text.with_prefix("<|eos|>"))
    assert (begun.start, begun.encode("a")) == (257, [257, 97])
    assert replace(loaded, trained=False).start is None


def test_decode_gives_the_text_back_that_was_encoded(model):
    loaded = model(bos=True)
    tokens = loaded.encode("aé")
    assert loaded.decode(tokens) == loaded.decode(torch.tensor(tokens)) == "aé"
    assert loaded.decode(tokens, skip_special=False) == "<|bos|>aé"
    for wrong in ("a text", 5, [1.5], [True], [[97]]):
        with pytest.raises(WorkhorseError, match="tokens are a sequence of token ids, not"):
            loaded.decode(wrong)
    rows = loaded.decoder.config.vocab_size
    assert loaded.decode([*range(loaded.text.vocab_size, rows), 97]) == "a"  # a padded embedding
    with pytest.raises(WorkhorseError, match=f"token id {rows} is not in the vocabulary of 258"):
        loaded.decode([rows])
    with pytest.raises(WorkhorseError, match="tiny has no tokenizer"):
        replace(loaded, tokenizer=None).decode(tokens)


def test_generate_from_a_text_or_from_tokens(model):
    loaded = model()
    from_text = loaded.generate("ab", seed=1, max_new_tokens=8)
    assert from_text == loaded.generate([97, 98], seed=1, max_new_tokens=8)
    assert str(from_text) == from_text.text
    assert "".join(d.text for d in loaded.stream("ab", seed=1, max_new_tokens=8)) == from_text.text
    assert loaded.generate_batch(["ab", "c"], seed=1, max_new_tokens=8)[0] == from_text
    with pytest.raises(WorkhorseError, match="n_samples=2 returns several completions"):
        loaded.generate("ab", n_samples=2)


def test_a_draft_guesses_for_a_model_of_its_vocabulary(model):
    loaded, draft = model(), model()
    plain = loaded.generate("ab", temperature=0, max_new_tokens=9)
    for call in (loaded.generate, lambda prompt, **o: loaded.generate_batch([prompt], **o)[0]):
        guessed = call("ab", draft=draft, speculate=3, temperature=0, max_new_tokens=9)
        assert guessed.tokens == plain.tokens
        assert guessed.proposed > 0
    deltas = loaded.stream("ab", draft=draft, speculate=3, temperature=0, max_new_tokens=9)
    assert tuple(delta.token for delta in deltas) == plain.tokens
    other = train_tokenizer(
        BytesConfig(special=SpecialTokensConfig(bos=None, eos="<|end|>", pad=None, chat=())), []
    )
    stranger = Model("stranger", draft.decoder, other, trained=True)
    with pytest.raises(WorkhorseError) as error:
        loaded.generate("ab", draft=stranger, speculate=3)
    assert str(error.value) == (
        "the tokenizers of stranger and tiny have different vocabularies; choose a draft with the "
        "model's own tokenizer"
    )


def test_typed_text_is_never_a_special_token(model):
    assert 257 not in model().encode("<|eos|>")


@pytest.fixture
def small_gpt2(monkeypatch):
    small = preset("gpt2").replace(n_layers=1, vocab_size=300)
    monkeypatch.setattr("workhorse.model.load.preset", {"gpt2": small}.get)


@pytest.mark.usefixtures("small_gpt2")
def test_a_preset_has_random_weights_and_says_so():
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="^gpt2 is a preset: its weights are random"):
        loaded = workhorse.load("gpt2")
    assert torch.equal(state, torch.get_rng_state())
    assert loaded.config.vocab_size == 300
    assert not loaded.trained
    assert loaded.decoder(torch.tensor([[1, 2, 3]])).shape == (1, 3, 300)
    # Ids that the byte tokenizer does not have are never chosen, so every result is text.
    assert max(loaded.generate("ab", max_new_tokens=10).tokens) < loaded.tokenizer.vocab_size


@pytest.mark.usefixtures("small_gpt2")
def test_dtype_and_quiet():
    told = []
    loaded = workhorse.load("gpt2", dtype="bfloat16", notify=told.append)
    assert loaded.decoder.embedding.tokens.weight.dtype == torch.bfloat16
    assert len(told) == 1
    assert len(loaded.generate("ab", max_new_tokens=3).tokens) == 3


def test_what_is_not_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WorkhorseError, match=r"config\.json has no 'model_type'"):
        workhorse.load(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "model.safetensors")
    with pytest.raises(
        WorkhorseError, match=r"has weights but no config\.json; add the model's config\.json"
    ):
        workhorse.load(tmp_path)
    with pytest.raises(WorkhorseError, match="no folder, hub id or preset 'gpt22'; did you mean"):
        workhorse.load("gpt22")
    with pytest.raises(WorkhorseError, match=r"^dtype 'float3' is unknown; did you mean 'float32'"):
        workhorse.load("gpt2", dtype="float3")
    with pytest.raises(WorkhorseError, match=r"^device=warp is not a device; choose cpu"):
        workhorse.load("gpt2", device="warp")


@pytest.mark.parametrize("name", [None, 3, b"x"])
def test_a_model_has_a_name(name) -> None:
    with pytest.raises(WorkhorseError, match=r"^a model is a path, a hub id or a preset's name"):
        workhorse.load(name)


@pytest.mark.parametrize("name", ["runs/a.gguf", "a.gguf", "runs/a", "./a", "a/b/c", "../a/b.json"])
def test_a_path_to_nothing_is_not_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for look in (workhorse.load, describe):
        with pytest.raises(WorkhorseError) as refused:
            look(name)
        assert str(refused.value) == f"{name} does not exist; check the path"


@pytest.mark.parametrize("name", ["a" * 300, "a/" + "b" * 300])
def test_a_name_that_is_too_long_for_a_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WorkhorseError, match="there is no folder"):
        workhorse.load(name)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantize", "int2"),
        ("quantize", None),
        ("kernel", None),
        ("execution", "fast"),
        ("execution", None),
        ("device", "\n"),
        ("dtype", "\n"),
        ("dtype", numpy.ones((2, 2))),
        ("device", None),
        ("device", 1.5),
        ("dtype", None),
        ("dtype", torch.int8),
        ("dtype", []),
    ],
)
def test_an_option_of_load_that_is_none(option: str, value: object) -> None:
    with pytest.raises(WorkhorseError, match=rf"^{option}[= ].* (is unknown|is not a device); "):
        workhorse.load("gpt2", **{option: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("notify", [5, None, "print"])
def test_what_cannot_be_told_anything(notify, run_folder: Path, tmp_path: Path) -> None:
    for use in (workhorse.load, partial(convert, target=tmp_path / "out", to="hf")):
        with pytest.raises(
            WorkhorseError, match=r"^notify=.* is not a function; give one that takes a string"
        ):
            use(run_folder, notify=notify)


@pytest.mark.parametrize("rows", [None, "3", 0, -1, 1.5, float("nan"), True])
def test_rows_that_cannot_be_decoded_together(rows, model) -> None:
    for prompts in (["a", "b"], []):
        with pytest.raises(
            WorkhorseError, match=r"^batch_size=.* is out of range; give an integer of 1 or more"
        ):
            model().generate_batch(prompts, batch_size=rows)
    assert len(model().generate_batch(["a", "b"], batch_size=numpy.int64(1), seed=1)) == 2


@pytest.mark.parametrize("config", [5, "greedy", {"max_new_tokens": 3}])
def test_what_is_no_config_of_generation(config, model) -> None:
    for use in (model().generate, model().stream, partial(model().generate_batch, ["a"])):
        with pytest.raises(
            WorkhorseError, match=r" is not a GenerationConfig; give options by name"
        ):
            use(*(() if isinstance(use, partial) else ("a",)), config)


@pytest.mark.parametrize("prompt", [None, b"ab", [97], numpy.ones((2, 2)), 5])
def test_only_a_text_is_encoded(prompt, model) -> None:
    with pytest.raises(WorkhorseError, match=r"^prompt=.* is not a string; give a str$"):
        model().encode(prompt)


@pytest.mark.usefixtures("small_gpt2")
def test_types_and_devices_of_torch():
    loaded = workhorse.load(
        "gpt2", dtype=torch.bfloat16, device=torch.device("cpu"), notify=lambda line: None
    )
    assert loaded.decoder.embedding.tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("format", ["run", "hf", "workhorse"])
@pytest.mark.parametrize("quantized", ["int8", "int4"])
def test_quantised_while_it_is_read(
    format: Format, quantized: FormatName, run_folder: Path, tmp_path: Path
) -> None:
    if format != "run":
        convert(run_folder, tmp_path / "model", format)
        run_folder = tmp_path / "model"
    loaded = workhorse.load(run_folder, quantize=quantized).decoder
    expected = quantize(workhorse.load(run_folder, execution="reference").decoder, quantized)
    found = loaded.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_model_can_be_executed_by_other_means(run_folder: Path) -> None:
    """The parameters are the same; the original decoder stays as its config builds it."""
    model = workhorse.load(run_folder)
    plain = model.with_execution("reference")
    assert plain.decoder is plain.reference is model.reference
    assert plain.announcement == "decode: reference"
    assert type(plain.decoder) is Decoder
    again = plain.with_execution()
    for name, weight in model.reference.named_parameters():
        assert dict(model.decoder.named_parameters())[name] is weight
        assert dict(again.decoder.named_parameters())[name] is weight
    options = {"max_new_tokens": 8, "temperature": 0}
    assert plain.generate("a", **options).text == again.generate("a", **options).text


def test_what_is_no_prompt(model) -> None:
    loaded = model()
    with pytest.raises(
        WorkhorseError, match=r"^a prompt is a string or a sequence of token ids, not"
    ):
        loaded.generate(["one", "two"])
    with pytest.raises(
        WorkhorseError, match=r"^prompts='one' is one string; give a list of prompts$"
    ):
        loaded.generate_batch("one")
    with pytest.raises(
        WorkhorseError, match=r"^prompts=None is not a list; give a list of strings or of token ids"
    ):
        loaded.generate_batch(None)
    with pytest.raises(WorkhorseError, match=r"^draft=3 is not a Model; give one from load$"):
        loaded.generate("a", draft=3)


@pytest.mark.parametrize("said", [None, 3])
def test_what_is_no_message(said, model) -> None:
    chat = model().chat()
    with pytest.raises(WorkhorseError, match=rf"^the message {said} is not a string; give a str$"):
        next(chat.reply(said))
    assert chat.messages == []
    with pytest.raises(WorkhorseError, match=rf"^system={said} is not a string; give a string"):
        model().chat(system=said)


TABLE = numpy.ones((2, 2), dtype=int)
NOWHERE = torch.tensor([1], device="meta")
NO_IDS = [None, 3, [True, False], b"ab", {97, 98}, [97.0], TABLE, torch.tensor([[1]]), NOWHERE]


@pytest.mark.parametrize("prompt", NO_IDS)
def test_what_holds_no_token_ids(prompt, model) -> None:
    with pytest.raises(
        WorkhorseError, match=r"^a prompt is a string or a sequence of token ids, not"
    ):
        model().generate(prompt)
    with pytest.raises(WorkhorseError, match=r"^tokens are a sequence of token ids, not .*; give"):
        model().decode(prompt)


def test_a_run_whose_recipe_says_nothing_of_data(run_folder: Path) -> None:
    (run_folder / "recipe.yaml").write_text("name: tiny\n")
    with pytest.raises(
        WorkhorseError, match=r"recipe\.yaml has no section 'data'; restore the recipe"
    ):
        workhorse.load(run_folder)


def test_a_run_that_began_with_a_chat_model_knows_how_to_chat(run_folder: Path) -> None:
    (run_folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert not workhorse.load(run_folder).trained_to_chat  # the tokenizer is from elsewhere
    base = shutil.copytree(run_folder, run_folder.with_name("base"))
    recipe = run_folder / "recipe.yaml"
    for init, chats in (("some/chat-model", True), (base, False)):
        recipe.write_text(f"{(base / 'recipe.yaml').read_text()}init: {init}\n")
        assert workhorse.load(run_folder).trained_to_chat is chats


def test_a_chat_stops_where_the_model_does(run_folder: Path) -> None:
    loaded = workhorse.load(run_folder)
    free = next(iter(loaded.chat(seed=1, max_new_tokens=5).reply("a")))
    stopping = dataclasses.replace(loaded, stop_tokens=(free.token,))
    deltas = list(stopping.chat(seed=1, max_new_tokens=5).reply("a"))
    assert [delta.finish_reason for delta in deltas] == ["eos"]


@pytest.mark.parametrize("option", ["kernel", "quantize", "device"])
@pytest.mark.parametrize("value", [torch.tensor([1, 2]), 10**30])
def test_options_of_another_kind(option, value):
    with pytest.raises(WorkhorseError, match=rf"^{option}=.*; choose "):
        workhorse.load("gpt2", **{option: value})


def test_a_preset_s_name_is_a_text():
    with pytest.raises(WorkhorseError, match=r"^no preset 3; "):
        preset(3)


def test_prompts_of_one_call_share_the_numbers_of_the_seed(model):
    """The model is used as docs/python.md and docs/generation.md describe."""
    first, other, again = model().generate_batch(["ab", "c", "ab"], seed=3, max_new_tokens=8)
    assert first == again != other
    assert first.seed == again.seed == other.seed == 3


def test_a_warning_points_at_the_line_that_loads(run_folder, tmp_path):
    workhorse.save(workhorse.load(run_folder, execution="reference").decoder, tmp_path / "bare")
    for warned in (
        lambda: workhorse.load(tmp_path / "bare"),
        lambda: convert(tmp_path / "bare", tmp_path / "ours", "workhorse"),
    ):
        with pytest.warns(UserWarning, match="no tokenizer") as caught:
            warned()
        assert [record.filename for record in caught] == [__file__]
