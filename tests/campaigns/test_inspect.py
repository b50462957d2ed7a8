"""Campaign: the pages of `workhorse inspect` in a browser, opened from disk without a network.

    make campaign-inspect

It needs what `test_page.py` needs. The page computes a small model of each block type; its logits,
terms and ablations are compared with PyTorch's.
"""

import dataclasses
import re
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

import workhorse.inspect.page as pages
from tests.campaigns.test_page import SIZES, Checks, expect
from tests.nn import grid
from tests.nn.grid import COVERING
from workhorse.generate.sampling import temperature, top_k, top_p
from workhorse.inspect import attribute, trace
from workhorse.inspect.page import page_data, token_limit, write_page
from workhorse.model.model import Model
from workhorse.nn import DecoderConfig
from workhorse.tokenizers import (
    BpeConfig,
    ByteFallbackBpeConfig,
    BytesConfig,
    CharactersConfig,
    Tokenizer,
    UnigramConfig,
    WordPieceConfig,
    train_tokenizer,
)

pytestmark = pytest.mark.campaign

RMS, LAYER, ROPE = {"kind": "rms_norm"}, {"kind": "layer_norm"}, {"kind": "rope", "theta": 100}
MLP = {"kind": "mlp", "d_ff": 40, "activation": "gelu", "bias": True}
GATED = {"kind": "gated_mlp", "d_ff": 40}
YARN = {"kind": "yarn", "factor": 4, "original_max_seq_len": 32, "beta_fast": 4}
SCALED = {"kind": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}
OLD = {"qkv_bias": True, "out_bias": True}


def block(kind: str, norm: Any = RMS, ff: Any = GATED, **given: Any) -> dict[str, Any]:
    names = ("residual_multiplier", "norm_residual", "norm_attention", "norms", "convolution")
    own = {name: given.pop(name) for name in names if name in given}
    attention = {"n_heads": 4, "position": ROPE, **given}
    return {"kind": kind, "norm": norm, "attention": attention, "feed_forward": ff, **own}


BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        block("pre_norm", n_kv_heads=2, qk_norm={"norm": RMS}),
        {"final_norm": RMS, "head": {"tied": True}},
    ),
    "gpt2": (
        block("pre_norm", LAYER, MLP, position={"kind": "none"}, scale_by_layer=True, **OLD),
        {"final_norm": LAYER, "embedding": {"position": {"kind": "learned", "offset": 2}}},
    ),
    "bloom": (
        block("pre_norm", LAYER, MLP, position={"kind": "alibi"}, norm_residual=True, **OLD),
        {"final_norm": LAYER, "embedding": {"norm": LAYER}},
    ),
    "post": (
        block("post_norm", LAYER, {**MLP, "activation": "relu"}, position={"kind": "none"}, **OLD),
        {"embedding": {"position": {"kind": "sinusoidal"}, "multiplier": 5.6, "width": 24}},
    ),
    "gemma": (
        block(
            "sandwich_norm",
            {**RMS, "offset": True},
            {**GATED, "activation": "gelu_tanh"},
            softcap=5.0,
            window=4,
            position={**ROPE, "fraction": 0.5, "pairing": "interleaved"},
        ),
        {
            "final_norm": {**RMS, "offset": True},
            "embedding": {"multiplier": 5.657, "round_multiplier": True},
            "head": {"tied": True, "cap": 4.0},
        },
    ),
    "olmo": (
        block("reordered_norm", qk_norm={"norm": RMS, "over": "full"}, clip=1.0),
        {"final_norm": RMS, "head": {"bias": True, "multiplier": 0.7}},
    ),
    "gptj": (
        block("parallel", LAYER, MLP, residual_multiplier=0.5, position={**ROPE, "reverse": True}),
        {"final_norm": LAYER},
    ),
    "neox": (
        block(
            "parallel",
            {**LAYER, "bias": False},
            {**GATED, "activation": "sigmoid", "inner_norm": RMS},
            norms=2,
            convolution={"width": 3},
            qk_norm={"norm": LAYER, "over": "each_head"},
        ),
        {"final_norm": {**LAYER, "weight": False, "bias": False}},
    ),
    "gptoss": (
        block(
            "pre_norm",
            ff={"kind": "clamped_gated_mlp", "d_ff": 40, "limit": 0.5},
            sinks=True,
            chunk=5,
            output_gate=True,
            inner_norm=RMS,
            value_dim=6,
            position={**ROPE, "scaling": YARN},
            query_scaling={"scale": 0.3, "length": 4},
        ),
        {"final_norm": RMS},
    ),
    "hunyuan": (
        block(
            "pre_norm",
            ff={**MLP, "activation": "xielu"},
            norm_attention=False,
            qk_norm={"norm": RMS, "after_rope": True},
            position={**ROPE, "scaling": {**SCALED, "original_max_seq_len": 64}},
        ),
        {"final_norm": RMS},
    ),
    "mpt": (
        block(
            "pre_norm",
            LAYER,
            MLP,
            position={"kind": "alibi", "scaled": True},
            scale_by_layer=True,
        ),
        {"final_norm": LAYER},
    ),
    "relu2": (
        block(
            "sandwich_norm",
            LAYER,
            {**MLP, "activation": "relu2"},
            position={**ROPE, "scaling": {"kind": "linear", "factor": 2}},
        ),
        {},
    ),
}
IDS = [7, 41, 7, 99, 3, 250, 41, 7, 12, 12, 64, 0, 200, 41]


def model(name: str, tokenizer: Any = None, vocab_size: int = 257) -> Model:
    blocks, rest = BLOCKS[name]
    sizes = {"vocab_size": vocab_size, "d_model": 32, "n_layers": 3, "max_seq_len": 64}
    torch.manual_seed(0)
    decoder = DecoderConfig.from_dict({**sizes, "blocks": {"main": blocks}, **rest}).build()
    with torch.no_grad():
        for parameter in decoder.parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.2
            parameter.add_(torch.randn_like(parameter) * spread)
    text = tokenizer or train_tokenizer(BytesConfig(), [])
    return Model(name, decoder.eval(), text, trained=False)


@pytest.fixture
def problems():
    """Errors and requests of the pages of a test."""
    return []


@pytest.fixture
def visit(browser, tmp_path, problems):
    """A function that writes a page and opens it. Errors and requests fail the test."""
    contexts = []

    def open(data, **options):
        write_page(tmp_path / "page.html", data)
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text))
        page.on("request", lambda request: problems.append(request.url))
        page.goto(f"file://{tmp_path / 'page.html'}")
        assert problems.pop(0).startswith("file://")
        return page

    yield open
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize("name", BLOCKS)
def test_the_page_computes_what_pytorch_does(visit, name):
    made = model(name)
    data = page_data(made, IDS)
    page = visit(data)
    run = trace(made.reference, IDS)
    found = torch.tensor(page.evaluate("[...state.run.end.logits]")).view_as(run.logits)
    assert (found - run.logits).abs().max() < 1e-4
    for position, target in ((13, 5), (6, 200)):
        expected = attribute(made.reference, IDS, target, position=position, parts="heads")
        terms = page.evaluate(f"[...state.run.terms({position}, {target})]")
        assert sum(terms) == pytest.approx(expected.logit, abs=1e-4)
        heads = torch.cat([term.flatten() for term in expected.terms.values()]).tolist()
        biases = sum(expected.biases.values())
        assert terms == pytest.approx([expected.token, expected.position, *heads, biases], abs=1e-4)
    weights = run["layers.1.attention.kernel.weights"][0].flatten().tolist()
    assert page.evaluate("[...state.run.pass.layers[1].weights]") == pytest.approx(
        weights, abs=1e-5
    )
    page.evaluate("Object.assign(state, {temperature: 0.7, topK: 40, topP: 0.8}); 0")
    chosen = page.evaluate("(({order, p}) => p.map((x, i) => [order[i], x]))(sampled())")
    logits = top_p(top_k(temperature(run.logits[:, -1], 0.7), 40), 0.8).softmax(-1)[0]
    assert {int(i): p for i, p in chosen} == pytest.approx(
        {int(i): float(logits[i]) for i in logits.nonzero()[:, 0]}, abs=1e-4
    )
    edits: Any = {
        "layers.1.attention.kernel": lambda z: z * torch.tensor([1, 0, 1, 1])[:, None, None],
        "layers.0.feed_forward_branch": lambda y: y.mean(1, keepdim=True).expand_as(y),
    }
    edited = trace(made.reference, IDS, edits=edits).logits[0, -1].softmax(-1)
    page.evaluate("edits = new Map([['1.1', 'zero'], ['0.f', 'mean']]); 0")
    assert page.evaluate("[...edited(edits, 13)]") == pytest.approx(edited.tolist(), abs=1e-5)


@pytest.mark.parametrize("config", COVERING, ids=map(grid.name, range(len(COVERING))))
def test_the_page_computes_every_option(visit, config):
    torch.manual_seed(0)
    made = Model("covering", config.build().eval(), None, trained=False)
    with torch.no_grad():
        for parameter in made.reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    ids = [number % config.vocab_size for number in IDS][: token_limit(made.reference)]
    data = page_data(made, ids, ablations=False)
    page, run = visit(data), trace(made.reference, ids)
    expect(page.locator("#failed")).to_be_hidden()
    expect(page.locator("#lens tbody tr")).to_have_count(config.n_layers + 1)
    live = "reason" not in data["live"]
    assert page.evaluate("model !== null") == live
    if live:
        found = page.evaluate("[...state.run.end.logits]")
        assert found == pytest.approx(run.logits[0].flatten().tolist(), rel=2e-3, abs=1e-3)


@pytest.mark.parametrize("kind", ["wiring", "position", "activation", "scale"])
def test_a_page_that_computes_wrongly_shows_the_recorded_pass(visit, kind):
    data = page_data(model("llama"), IDS)
    block, place = data["config"]["blocks"]["main"], data["positions"]["blocks"]["main"]
    match kind:
        case "wiring":
            block["kind"] = "woven"
        case "position":
            place["kind"] = "waves"
        case "activation":
            block["feed_forward"]["activation"] = "mish"
        case _:
            data["live"]["scales"] = [9.0, 9.0, 9.0]
    page = visit(data)
    expect(page.locator("#status")).to_contain_text("does not compute by itself: the script failed")
    expect(page.locator("#lens tbody tr")).to_have_count(4)
    expect(page.locator("#sum")).to_contain_text("Sum: the logit of")
    expect(page.locator("#failed")).to_be_hidden()


def test_an_error_of_the_script_is_shown(visit, problems):
    page = visit({**page_data(model("llama"), IDS), "labels": []})
    expect(page.locator("#failed")).to_contain_text("The script of this page failed")
    assert problems.pop() in page.locator("#failed").inner_text()


TEXTS = [
    "def main(args):\n    return 1234 + x_y's",
    "Größe “naïve” 12345 中文 🙂",
    "  a\t\tb \r\n\n",
    "I'LL don't",
]
CORPUS = [*TEXTS, "the theory of the thing, then: 42! " * 20, "main(args) returns args\n" * 20]
TOKENIZERS = {
    "bpe": BpeConfig(vocab_size=320),
    "bpe of gpt2": BpeConfig(vocab_size=320, split="gpt2"),
    "bytes": BytesConfig(),
    "characters": CharactersConfig(),
    "byte_fallback_bpe": ByteFallbackBpeConfig(vocab_size=340),
    "unigram": UnigramConfig(vocab_size=340),
    "unigram_unk": UnigramConfig(vocab_size=300, byte_fallback=False, prefix_space=False),
    "wordpiece": WordPieceConfig(vocab_size=300, lowercase=True),
}


def library(model: Any, trainer: Any, **rules: Any) -> Tokenizer:
    made = tokenizers.Tokenizer(model)
    for name, rule in rules.items():
        setattr(made, name, rule)
    made.train_from_iterator([*CORPUS, "<!-- <b> --> <!-- </b> --> " * 20], trainer)
    return Tokenizer(made.to_str())


def byte_level(special: str, *before: Any, dropout: float | None = None) -> Tokenizer:
    trainer = BpeTrainer(vocab_size=400, special_tokens=[special], show_progress=False)
    cut = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return library(BPE(dropout=dropout), trainer, pre_tokenizer=cut)


def bert(strip_accents: bool | None) -> Tokenizer:
    trainer = WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    rule = normalizers.BertNormalizer(strip_accents=strip_accents)
    pieces = pre_tokenizers.BertPreTokenizer()
    return library(WordPiece(unk_token="[UNK]"), trainer, normalizer=rule, pre_tokenizer=pieces)


def digits_beside_bytes() -> Tokenizer:  # the ids of the bytes of é are 196 and 170
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"0179", "17", "170", "1701"]
    vocab = {name: number for number, name in enumerate(names)}
    merges = [("1", "7"), ("17", "0"), ("170", "1")]
    made = BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    return Tokenizer(tokenizers.Tokenizer(made).to_str())


FOREIGN = {
    "a special token that merges reach": lambda: byte_level("<!--"),
    "accents by default": lambda: bert(None),
    "accents": lambda: bert(strip_accents=True),
    "digits beside bytes": digits_beside_bytes,
}
UNKNOWN = {
    "BPE with dropout": lambda: byte_level("<s>", dropout=0.5),
    "a regular expression with another meaning in JavaScript": lambda: byte_level(
        "<s>", pre_tokenizers.Split(tokenizers.Regex(r"\w+"), "isolated")
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_page_encodes_what_the_tokenizer_does(visit, kind):
    tokenizer = train_tokenizer(TOKENIZERS[kind], CORPUS)
    made = model("llama", tokenizer, tokenizer.vocab_size)
    page = visit(page_data(made, "the thing"))
    assert page.evaluate("tokenizerFails") == ""
    for text in [*TEXTS, "unseen: żółć Ω ⟦⟧ 7", "x" * 30]:
        assert page.evaluate("text => tokenizer.encode(text)", text) == made.encode(text), text


ODD = [
    "<!--</b>é1701",
    "ΑΣ ΑΣ.",
    "\uffff\u0378",
    "    \n\U0001d49c\U0001f9ff",
    "\x00\x01\ufeff",
    "e\u0301\u0327",
    "",
]


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_page_encodes_with_other_tokenizers(visit, kind):
    tokenizer = FOREIGN[kind]()
    page = visit(page_data(model("llama", tokenizer, tokenizer.vocab_size), "1"))
    assert page.evaluate("tokenizerFails") == ""
    for text in [*TEXTS, *ODD, "x" * 200]:
        found = page.evaluate("text => tokenizer.encode(text)", text)
        assert found == tokenizer.encode(text), text


@pytest.mark.parametrize("reason", UNKNOWN)
def test_the_page_does_not_encode_with_unknown_rules(visit, reason):
    tokenizer = UNKNOWN[reason]()
    page = visit(page_data(model("llama", tokenizer, tokenizer.vocab_size), [1]))
    assert page.evaluate("tokenizerFails") == reason


def test_large_logits_and_long_prompts(visit):
    made = model("llama")
    with torch.no_grad():
        made.decoder.get_parameter("embedding.tokens.weight").mul_(1e4)  # tied: large logits
    page = visit(page_data(made, IDS), viewport={"width": 320, "height": 700})
    logprobs = trace(made.reference, IDS).logits[0].log_softmax(-1)
    found = page.evaluate("[...Array(13).keys()].map((t) => state.run.score(t).logprob)")
    expected = logprobs[range(13), IDS[1:]].tolist()
    assert min(expected) < -1000
    assert found == pytest.approx(expected, rel=1e-4)
    assert "Infinity" not in page.inner_text("body")
    shown = page.evaluate("[0, 4.5e-6, 0.00045, 0.03, 0.6].map(percent)")
    assert shown == ["0 %", "< 0.01 %", "0.045 %", "3.0 %", "60 %"]
    page.fill("#text", "return" * 4000)
    expect(page.locator("#status")).to_contain_text("24,000 characters")
    page.evaluate("data.pieces[65] = 'long'.repeat(1000)")
    page.fill("#text", "AAAA")
    expect(page.locator(".pick").first).to_have_text("long" * 10 + "…")
    assert page.evaluate("document.documentElement.scrollWidth") == 320


def test_without_javascript(visit):
    page = visit(page_data(model("llama"), IDS), java_script_enabled=False)
    assert "This page needs JavaScript" in page.inner_text("header")


looks = pytest.mark.parametrize("look", [(s, size) for s in ("light", "dark") for size in SIZES])
TEXT = "the cat saw the cat. "


def opened(visit, look, data):
    scheme, size = look
    page = visit(data, viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce")
    return page, Checks(page, f"{scheme}-{size}")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gptoss"])
def test_other_positions_are_accessible(visit, name):
    for look in (("light", "narrow"), ("dark", "wide")):
        _, check = opened(visit, look, page_data(model(name), TEXT))
        check(f"live {name}")


@looks
def test_the_figures_of_a_live_page(visit, look):
    page, check = opened(visit, look, page_data(model("llama"), TEXT))
    check("live")
    expect(page.locator("#status")).to_contain_text("differ from PyTorch")
    page.fill("#text", "the dog saw the cat")
    expect(page.locator(".pick")).to_have_count(19)
    page.locator(".pick").nth(4).click()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".pick").nth(5)).to_have_attribute("aria-checked", "true")
    page.locator(".head").nth(5).click()
    expect(page.locator("#head-title")).to_contain_text("Layer 1, head 1")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#head-title")).to_contain_text("Layer 2, head 1")
    page.get_by_role("button", name="Lines between tokens").click()
    expect(page.locator(".arcs path").first).to_be_attached()
    check("lines")
    page.get_by_role("button", name="Map").click()
    page.locator("#head-map canvas").hover(position={"x": 4, "y": 20})
    expect(page.locator("#head-map p")).to_contain_text("looks at “t” (0)")
    page.locator(".cell").nth(25).click()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#cell-title")).to_have_text("Prediction after layer 1")
    page.click("#theme")
    check("other theme")


@looks
def test_the_controls_of_a_live_page(visit, look):
    page, check = opened(visit, look, page_data(model("llama"), "the dog saw the cat"))
    page.get_by_role("button", name="Single heads").click()
    expect(page.locator("#terms tr")).to_have_count(16)
    page.locator("#targets button").nth(1).click()
    expect(page.locator("#sum")).to_contain_text("Sum: the logit of")
    for slider, value in (("Temperature", "0.5"), ("Top-k", "3"), ("Top-p", "0.9")):
        page.get_by_label(slider).fill(value)
    expect(page.locator("#kept")).to_contain_text(" of 257 tokens can be drawn")
    page.get_by_label("Temperature").fill("0")
    expect(page.locator("#kept")).to_contain_text("1 of 257")
    page.get_by_role("button", name="Draw a token").click()
    expect(page.locator(".pick")).to_have_count(20)
    page.locator("#next button").nth(2).click()
    expect(page.locator(".pick")).to_have_count(21)
    page.get_by_role("button", name="Replace layer 0, head 2").click()
    page.get_by_role("button", name="Mean", exact=True).click()
    page.get_by_role("button", name="Replace layer 2, layer").press("Enter")
    expect(page.locator("#change")).to_contain_text("2 parts are replaced")
    page.get_by_role("button", name="Patch").click()
    page.fill("#other-text", "too short")
    expect(page.locator("#other-status")).to_contain_text("It has 9 tokens; the prompt has 21.")
    page.fill("#other-text", "the dog saw the fox12")
    page.get_by_role("button", name="Replace layer 1, attention").click()
    expect(page.locator("#change")).to_contain_text("3 parts are replaced")
    expect(page.locator("[data-part='2.l']")).to_have_attribute("aria-label", re.compile("nats"))
    page.get_by_role("button", name="Zero").click()
    page.evaluate("compute(state.run.ids)")
    page.get_by_role("button", name="Patch").click()  # the other prompt is read again
    expect(page.locator("#change")).to_contain_text("3 parts are replaced")
    check("switches")
    page.get_by_role("button", name="Everything on").click()
    expect(page.locator("#change")).to_contain_text("Everything is on")
    page.fill("#text", "a" * 65)
    expect(page.locator("#status")).to_contain_text("up to 64")
    page.fill("#text", "")
    expect(page.locator("#status")).to_contain_text("at least one token")


@looks
@pytest.mark.parametrize("name", ["gemma", "post"])
def test_a_recorded_page(visit, look, name, monkeypatch):
    monkeypatch.setattr(pages, "LIVE_PARAMETERS", 0)
    made = model(name)
    page, check = opened(visit, look, page_data(made, TEXT))
    expect(page.locator("#status")).to_contain_text("it has")
    page.locator(".pick").nth(3).click()
    page.get_by_role("button", name="Replace layer 1, head 2").click()
    expect(page.locator("#change")).to_contain_text("Without layer 1, head 2")
    page.locator("#targets button").last.click()
    page.get_by_label("Top-k").fill("5")
    expect(page.locator("#kept")).to_contain_text("5 of 257")
    check(f"recorded {name}")


@pytest.mark.parametrize("limit", [0, 2_000_000])
def test_a_page_of_one_token(visit, limit, monkeypatch):
    monkeypatch.setattr(pages, "LIVE_PARAMETERS", limit)
    page = visit(page_data(model("llama"), [5]))
    expect(page.locator("#loss")).to_have_text("One token: nothing to predict yet.")
    expect(page.locator("#cost-title")).to_contain_text("over 1 token:")


def test_a_model_without_a_tokenizer(visit):
    made = dataclasses.replace(model("olmo"), tokenizer=None)
    page = visit(page_data(made, IDS))
    page.fill("#text", "1 2, 300")
    expect(page.locator("#status")).to_contain_text("300 is not a token id")
    page.fill("#text", "1 2, 3")
    expect(page.locator(".pick")).to_have_text(["#1", "#2", "#3"])


def test_appended_tokens_are_read_again_from_the_text(visit):
    tokenizer = train_tokenizer(TOKENIZERS["byte_fallback_bpe"], CORPUS)
    page = visit(page_data(model("llama", tokenizer, tokenizer.vocab_size), "the thing"))
    page.evaluate("append(tokenizer.encode('theory')[0])")
    text = page.locator("#text").input_value()
    assert text.startswith("the thing")
    before = page.evaluate("state.run.ids.slice(0, 2)")
    page.fill("#text", text)
    page.wait_for_timeout(200)
    assert page.evaluate("state.run.ids.slice(0, 2)") == before
