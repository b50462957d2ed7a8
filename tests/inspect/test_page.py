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
from tests.nn.test_grid import config_classes, literal_choices
from workhorse.cli.main import main
from workhorse.inspect import page, trace
from workhorse.inspect.page import page_data, token_limit, why_not_live, write_page
from workhorse.model.load import load
from workhorse.model.model import Model
from workhorse.models import preset
from workhorse.nn import DecoderConfig
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, train_tokenizer

IDS = [3, 9, 3, 27, 0, 9]


@pytest.fixture
def model() -> Model:
    return Model("made", SMALL.build(), None, trained=False)


def values(array: dict[str, Any]) -> Tensor:
    content = bytearray(b64decode(array["base64"]))
    return torch.frombuffer(content, dtype=getattr(torch, array["dtype"])).view(array["shape"])


RECORDED = {"LatentAttentionConfig", "MoEConfig", "ClampedSwigluConfig", "RouterConfig"}
RECORDED |= {"HeadTransformConfig", "AttentionConfig.causal=False", "AlibiConfig.bfloat16=True"}
"""Parts of a model that the page's script does not compute, so the page shows a recording."""


def computed() -> dict[str, str]:
    (text,) = re.findall('id="computes">(.*?)</script>', page.TEMPLATE.read_text(), re.DOTALL)
    return json.loads(text)


def test_the_page_knows_every_config_field_and_value() -> None:
    """A new one: compute it in page.html and add it to `computes` there, or add it to RECORDED."""
    known, classes = computed(), {one.__name__: one for one in config_classes(DecoderConfig)}
    assert set(known) == set(classes) - RECORDED
    for name, words in known.items():
        fields = {field: values for field, _, values in (x.partition("=") for x in words.split())}
        assert set(fields) == set(classes[name].model_fields) - {"kind"}, name
        for field, values in fields.items():
            choices = literal_choices(classes[name].model_fields[field].annotation)
            refused = {str(one) for one in choices} - {*values.split("|")} if values else set()
            assert {f"{name}.{field}={one}" for one in refused} <= RECORDED
            if choices and not name.endswith("InitConfig"):
                assert values, f"{name}.{field} has no list of values"


@pytest.mark.parametrize(
    ("removed", "reason"),
    {
        "|gelu|": "activation=gelu",
        '"MlpConfig"': "feed_forward=mlp",
        '"QKNormConfig"': "qk_norm=...",
        " softcap ": "softcap=5.0",
    }.items(),
)
def test_parts_that_the_script_does_not_compute_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str, reason: str
) -> None:
    norm: Any = {"kind": "layer_norm"}
    attention: Any = {"n_heads": 2, "softcap": 5.0, "qk_norm": {"norm": norm}}
    block: Any = {"kind": "pre_norm", "norm": norm, "attention": attention}
    block["feed_forward"] = {"kind": "mlp", "d_ff": 8, "activation": "gelu"}
    config = SMALL.to_dict() | {"blocks": {"main": block}, "pattern": []}
    made = Model("made", DecoderConfig.from_dict(config).build(), None, trained=False)
    assert why_not_live(made) == ""
    template = tmp_path / "page.html"
    html = page.TEMPLATE.read_text()
    template.write_text(html.replace(removed, '"Other"' if '"' in removed else removed[0]))
    monkeypatch.setattr(page, "TEMPLATE", template)
    data = page_data(made, IDS)
    assert data["live"] == {"reason": f"the page does not compute {reason}"}
    assert data["ablations"] is not None


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
    assert target.read_text().count("</script>") == 3
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
        ("--json", "--tokens", "1" * 5000): "1… is not a list of token ids",
        ("--json", "--tokens", "99999"): "token ids range from 99999",
        ("--json", "--prompt", "a" * 40): "tokens, and the page of this model explains 1 to",
    }.items():
        assert main(["inspect", run, *arguments]) == 2
        assert message in capsys.readouterr().err
