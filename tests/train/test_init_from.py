"""Starting from a trained model with more tokens: initial rows, losses, exports, resuming."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import workhorse
from tests.train.chats import sums, write_lines
from tests.train.conftest import MODEL
from tests.train.runs import assert_same_run, notices, step_losses
from workhorse.checkpoints import weights_of
from workhorse.checkpoints.tensors import grown
from workhorse.data import Batches, prepare
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.run import estimate, train
from workhorse.run.init_from import start_weights
from workhorse.tokenizers import ChatTemplate, Tokenizer, load_tokenizer, train_tokenizer
from workhorse.train import Recipe, with_init

N = 290
"""Number of tokens of the bases."""
TOKENS = ["seven", "<think>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"]
GROWTH = {"add_tokens": TOKENS[:2], "chat": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, conversations, and the base models `tied`, `untied` and `padded`."""
    folder = tmp_path_factory.mktemp("growth")
    corpus = "".join(f"{number} and {number * 7}; " for number in range(400))
    (folder / "corpus.txt").write_text(corpus)
    write_lines(folder / "chats.jsonl", sums(24))
    heads = {"tied": {"tied": True}, "untied": {}, "padded": {"bias": True}}
    for name, head in heads.items():
        model = {**MODEL, "head": head, "vocab_size": N + 2 if name == "padded" else N}
        train(Recipe.from_dict(fields(folder, model=model)), folder / name)
    return folder


def fields(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "tokenizer": {"kind": "bpe", "vocab_size": N, "special": {"chat": []}},
        "data": {"corpus": {"kind": "text", "path": str(folder / "corpus.txt")}},
        "train": {
            "steps": 2,
            "batch_size": 4,
            "seq_len": 32,
            "log_every": 1,
            "checkpoint_every": 1,
            "optimizer": {"kind": "adamw", "learning_rate": 0.01},
            "schedule": {"warmup_steps": 0},
        },
        **changes,
    }


def from_base(folder: Path, base: str, tokenizer: dict[str, Any], **changes: Any) -> Recipe:
    changes = {"init": str(folder / base), "model": {}, "tokenizer": tokenizer, **changes}
    return Recipe.from_dict(with_init(fields(folder, **changes)))


def of_chats(folder: Path) -> dict[str, Any]:
    return {"corpus": {"kind": "conversations", "path": str(folder / "chats.jsonl")}}


def started(recipe: Recipe) -> Decoder:
    """Return the decoder that a recipe starts from."""
    tokenizer = train_tokenizer(recipe.tokenizer, ())
    decoder = recipe.decoder_config(tokenizer.vocab_size).build()
    start_weights(str(recipe.init), decoder, print, whole=decoder.config, tokenizer=tokenizer)
    return decoder


@pytest.mark.parametrize("base", ["tied", "untied", "padded"])
def test_new_rows_are_the_mean_and_old_weights_stay(folder: Path, base: str) -> None:
    decoder = started(from_base(folder, base, GROWTH))
    old = weights_of(workhorse.load(folder / base, execution="reference").decoder)
    assert decoder.config.vocab_size == N + 7
    grew = set[str]()
    for name, weight in weights_of(decoder).items():
        if weight.shape == old[name].shape:
            assert torch.equal(weight, old[name])
            continue
        grew.add(name)
        assert torch.equal(weight[:N], old[name][:N])
        mean = old[name][:N].double().mean(0).expand(7, *weight.shape[1:])
        torch.testing.assert_close(weight[N:].double(), mean, rtol=0, atol=1e-7)
    assert len(grew) == {"tied": 1, "untied": 2, "padded": 3}[base]


@pytest.mark.parametrize("shape", [(8, 3), (8,)], ids=["matrix", "bias"])
def test_rows_that_belong_to_no_token(shape: tuple[int, ...]) -> None:
    weight = torch.randn(*shape, generator=torch.manual_seed(0))
    mean = weight[:5].mean(0)
    free = grown(weight, 8, range(5, 7))  # ids 5 and 6 are new, and 7 stays free
    assert torch.equal(free[:5], weight[:5])
    torch.testing.assert_close(free[5:7], mean.expand(2, *shape[1:]))
    assert torch.equal(free[7], weight[7])
    padded = grown(weight, 10, range(5, 6))  # ids 8 and 9 only pad the vocabulary
    assert torch.equal(padded[6:8], weight[6:8])
    torch.testing.assert_close(padded[8:], mean.expand(2, *shape[1:]))
    assert grown(weight, 8, range(8, 5)) is weight


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_text_of_old_tokens_loses_only_in_the_normaliser(folder: Path, base: str) -> None:
    """The first loss is the base's plus the mean of `log(1 + Σ_new exp(z) / Σ_old exp(z))`."""
    recipes = [from_base(folder, base, added) for added in ({}, {"chat": True})]
    outs = [folder / f"{base}-{number}" for number in range(2)]
    for recipe, out in zip(recipes, outs, strict=True):
        train(recipe, out)
    before, after = (step_losses(out)[0][1] for out in outs)
    tokenizer = load_tokenizer(outs[1] / "tokenizer")
    data = prepare(recipes[1].data, tokenizer, outs[1] / "data")
    batch = Batches(data.train, seq_len=32, batch_size=4, seed=recipes[1].train.seed)[0]
    with torch.no_grad():
        weights = started(recipes[1]).double()(batch.tokens).exp()
    rise = float((weights[..., N:].sum(-1) / weights[..., :N].sum(-1)).log1p().mean())
    assert after - before == pytest.approx(rise, abs=2e-6)
    assert 0 < rise <= math.log1p(5 / N)


def test_a_grown_chat_model_everywhere(folder: Path, tmp_path: Path) -> None:
    """It resumes bit for bit, stops at the end of a turn, and exports to both foreign formats."""
    recipe, told = from_base(folder, "untied", GROWTH, data=of_chats(folder)), []
    train(recipe, tmp_path / "run", on_event=told.append)
    assert f"7 new tokens start as the mean of the {N} tokens of init" in "\n".join(notices(told))
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    shutil.rmtree(max((tmp_path / "resumed" / "checkpoints").glob("*2")))
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "resumed", step=2)

    model = workhorse.load(tmp_path / "run", execution="reference")
    assert model.tokenizer is not None
    ids = [model.tokenizer.token_id(token) for token in TOKENS]
    assert ids == [*range(N, N + 7)]
    assert model.tokenizer.encode("seven<|user|>").count(ids[0]) == 1
    assert not {*ids[1:]} & {*model.tokenizer.encode("seven<|user|>")}
    assert model.trained_to_chat
    assert model.stop_tokens == (ids[5], model.tokenizer.eos_id)

    workhorse.convert(tmp_path / "run", tmp_path / "hf", to="hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    reading = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    roles = ("system", "user", "assistant", "user", "tool")
    messages = [{"role": role, "content": f"seven <|end|> {role}"} for role in roles]
    template = ChatTemplate.of(model.tokenizer)
    plain = [{**one, "content": "seven <think>"} for one in messages]
    chat = template.encode(model.tokenizer, plain)
    assert reading.apply_chat_template(plain, add_generation_prompt=True)["input_ids"] == chat
    assert template.encode(model.tokenizer, messages).count(ids[5]) == 5  # none of those typed
    assert theirs.generation_config.eos_token_id == list(model.stop_tokens)
    with torch.no_grad():
        tokens = torch.tensor([chat])
        torch.testing.assert_close(theirs(tokens).logits, model.decoder(tokens), rtol=0, atol=1e-5)
        workhorse.convert(tmp_path / "run", tmp_path / "it.gguf", to="gguf", notify=print)
        gguf = workhorse.load(tmp_path / "it.gguf", execution="reference", notify=print)
        torch.testing.assert_close(gguf.decoder(tokens), model.decoder(tokens))
    assert gguf.tokenizer is not None
    assert ChatTemplate.of(gguf.tokenizer).encode(gguf.tokenizer, plain) == chat
    assert {*gguf.stop_tokens} == {*model.stop_tokens}

    again = from_base(tmp_path, "hf", {"add_tokens": ["nine"]}, data=of_chats(folder))
    estimate(again)  # a Hugging Face directory grows too
    assert again.model["vocab_size"] == N + 8


def test_a_template_alone_does_not_make_a_chat_model(folder: Path, tmp_path: Path) -> None:
    train(from_base(folder, "tied", {"chat": True}), tmp_path / "run")
    model = workhorse.load(tmp_path / "run", execution="reference")
    assert isinstance(model.tokenizer, Tokenizer)
    assert model.tokenizer.chat_templates
    assert not model.trained_to_chat
    assert model.stop_tokens == ()


@pytest.mark.parametrize(
    ("tokenizer", "model", "message"),
    [
        (
            {"add_tokens": ["<|bos|>"]},
            {},
            "tokenizer: added token '<|bos|>' is in the vocabulary already",
        ),
        ({"add_tokens": [""]}, {}, "tokenizer: added token '' is empty; remove it"),
        (
            {"add_tokens": ["ab", "ab"]},
            {},
            "tokenizer: added token 'ab' is in the vocabulary already",
        ),
        ({"add_token": ["ab"]}, {}, "tokenizer: unknown key 'add_token'; did you mean"),
        (GROWTH, {"vocab_size": N + 1}, f"vocab_size={N + 1} is less than the tokenizer's {N + 7}"),
        (
            GROWTH,
            {"n_layers": 3},
            "do not fit: model.n_layers is 3 in the recipe and 2 in init; remove model",
        ),
    ],
)
def test_growth_that_cannot_be(
    folder: Path, tokenizer: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkhorseError) as raised:
        estimate(from_base(folder, "untied", tokenizer, model=model))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_smaller_vocabulary_is_not_a_growth(folder: Path) -> None:
    changed = {"vocab_size": N + 1}
    with pytest.raises(WorkhorseError, match=f"vocab_size is {N + 1} in the recipe and {N + 2} in"):
        estimate(from_base(folder, "padded", {}, model=changed))


def test_a_second_template_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tied", tmp_path / "run")
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(WorkhorseError, match="has a chat template already; remove chat=true"):
        from_base(tmp_path, "run", {"chat": True})
