"""The pages of `workhorse inspect`: data and limits. In a browser: `make campaign-inspect`."""

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inspect.test_trace import SMALL
from workhorse.cli.main import main
from workhorse.inspect import page, trace
from workhorse.inspect.page import page_data, token_limit, why_not_live, write_page
from workhorse.model.load import load
from workhorse.model.model import Model
from workhorse.models import preset
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, train_tokenizer

IDS = [3, 9, 3, 27, 0, 9]


@pytest.fixture
def model() -> Model:
    return Model("made", SMALL.build(), None, trained=False)


def values(array: dict[str, Any]) -> Tensor:
    content = bytearray(b64decode(array["base64"]))
    return torch.frombuffer(content, dtype=getattr(torch, array["dtype"])).view(array["shape"])


@pytest.mark.parametrize("live", [True, False])
def test_the_data_are_those_of_the_pass(
    model: Model, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    if not live:
        monkeypatch.setattr(page, "LIVE_PARAMETERS", 0)
    data, run = page_data(model, IDS), trace(model.reference, IDS)
    best = run.logits[0].softmax(-1).topk(page.TOP)
    assert data["lens"]["ids"][-1] == best.indices.tolist()
    assert torch.tensor(data["lens"]["p"][-1]) == pytest.approx(best.values, rel=1e-3)
    own = run.logits[0, :-1].log_softmax(-1)[range(5), IDS[1:]]
    assert data["scores"]["logprob"] == pytest.approx(own.tolist(), abs=1e-5)
    terms = values(data["attribution"]["terms"])
    for position, targets in enumerate(data["attribution"]["targets"]):
        assert set(IDS[position + 1 : position + 2]) <= set(targets)
        sums = terms[: len(targets), position].sum(1)
        assert sums == pytest.approx(run.logits[0, position, targets].detach(), abs=1e-5)
    rows = torch.tril_indices(len(IDS), len(IDS))
    weights = run["layers.1.attention.kernel.weights"][0][:, rows[0], rows[1]]
    assert (values(data["attention"][1]) / 255 - weights).abs().max() < 0.002
    if live:
        assert data["ablations"] is None
        name = "layers.1.attention.q_proj.weight"
        assert torch.equal(values(data["live"]["weights"][name]), model.decoder.get_parameter(name))
        return
    edits: Any = {"layers.1.attention_branch": torch.zeros_like}
    changed = trace(model.reference, IDS, edits=edits).logits[0, -1].log_softmax(-1)
    kl = torch.nn.functional.kl_div(changed, run.logits[0, -1].softmax(-1), reduction="sum")
    assert data["ablations"]["kl"][1][4] == pytest.approx(float(kl), rel=2e-3)
    assert data["ablations"]["ids"][1][4] == changed.topk(page.TOP).indices.tolist()


def test_tokens_have_names() -> None:
    """A page names rows of a padded embedding by their number."""
    tokenizer = train_tokenizer(BytesConfig(special=SpecialTokensConfig()), [])
    decoder = SMALL.replace(vocab_size=tokenizer.vocab_size + 5).build()
    pieces = page_data(Model("made", decoder, tokenizer, trained=False), [97, 98])["pieces"]
    assert (pieces[97], pieces[tokenizer.eos_id]) == ("a", tokenizer.roles["eos"])
    assert {*pieces} == {*range(tokenizer.vocab_size)}


def test_a_page_keeps_its_limits_and_loads_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "LIVE_PARAMETERS", 0)
    data = page_data(model, [7] * 32)
    write_page(tmp_path / "page.html", data)
    html = (tmp_path / "page.html").read_text()
    assert not re.search(r"""(src|href|url|@import)\W{0,3}\s*['"(]?(https?:)?//""", html)
    assert "default-src 'none'; img-src data:; script-src 'sha256-" in html
    with pytest.raises(
        ValueError, match="the prompt has 33 tokens, and the page of this model expl"
    ):
        page_data(model, [7] * 33)
    large = preset("llama-2-7b").build(device="meta")
    assert 30 < token_limit(large) < 60
    monkeypatch.setattr(page, "PAGE_BYTES", 1000)
    with pytest.raises(ValueError, match="bytes, above 1,000; shorten the prompt"):
        write_page(tmp_path / "page.html", data)
    assert why_not_live(model).startswith("it has")


def test_numbers_that_are_not_finite(model: Model, tmp_path: Path) -> None:
    with torch.no_grad():
        model.decoder.get_parameter("embedding.tokens.weight")[11] = float("nan")  # not in IDS
    data = page_data(model, IDS)
    assert data["live"] == {"reason": "some of its weights are not finite"}
    write_page(tmp_path / "page.html", data)
    with pytest.raises(ValueError, match="some of its numbers are not finite; use --dtype float32"):
        write_page(tmp_path / "page.html", {**data, "norms": float("inf")})


def test_the_command(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, run = tmp_path / "page.html", str(run_folder)
    assert main(["inspect", run, "--prompt", "</script>é", "--out", str(target), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["prompt"] == "</script>é"
    assert data["live"]["tokenizer"]["model"]["type"]
    assert target.read_text().count("</script>") == 2
    assert main(["inspect", run, "--prompt", "a b", "--chat", "--json"]) == 0
    chat, model = json.loads(capsys.readouterr().out), load(run)
    assert chat["prompt"] == "a b"
    message = {"role": "user", "content": "a b"}
    assert chat["ids"] == model.chat_format().encode([message]) != model.encode("a b")
    for arguments, message in {
        ("--prompt", "a"): "no output is given; use --out FILE",
        ("--json",): "give either --prompt TEXT or --tokens IDS",
        ("--json", "--tokens", "5", "--chat"): "--chat needs a message",
        ("--json", "--tokens", "5;6"): "'5;6' is not a list of token ids",
        ("--json", "--tokens", "99999"): "token ids range from 99999",
        ("--json", "--prompt", "a" * 40): "tokens, and the page of this model explains 1 to",
    }.items():
        assert main(["inspect", run, *arguments]) == 2
        assert message in capsys.readouterr().err
