"""Several adapters over one base: models of their own for clients."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
import torch

import workhorse
from tests.serve.conftest import KEY, serving_here, small_config
from tests.serve.test_invariance import COMMON
from workhorse.checkpoints.peft import write_peft
from workhorse.cli.main import main
from workhorse.errors import WorkhorseError
from workhorse.execute.body import sharing_copy
from workhorse.generate import GenerationConfig, generate
from workhorse.model.convert import convert
from workhorse.model.model import Model
from workhorse.models.huggingface import family
from workhorse.serve.engine_process import build
from workhorse.serve.memory import fit
from workhorse.serve.run import parsed_adapters
from workhorse.serve.settings import EngineSettings
from workhorse.tokenizers import BytesConfig, train_tokenizer
from workhorse.transforms.adapters import adapter_parameters, add_adapter
from workhorse.transforms.lora import LoraConfig

CONFIG = small_config(
    vocab_size=257,
    n_layers=2,
    max_seq_len=256,
    head={"tied": False},
    init={"kind": "normal", "std": 0.3},
)
ADAPTERS = {
    "team/sql": LoraConfig(rank=4),
    "json": LoraConfig(rank=2, targets=("q_proj", "down_proj"), also_train=("head",)),
    "dora": LoraConfig(rank=2, dora=True),
}
RESPONSE = {"input": "a", "max_output_tokens": 16, "store": False}
MODELS = ("base", "team/sql", "json")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face directory `base`, and adapters of it in PEFT's format."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    tokenizer = train_tokenizer(BytesConfig(), [])
    base = Model("random", CONFIG.build(), tokenizer, trained=True)
    found = {"base": convert(base, folder / "base", "hf", notify=print).path}
    for name, config in ADAPTERS.items():
        decoder = add_adapter(sharing_copy(base.reference), config)
        with torch.no_grad():
            for parameter in adapter_parameters(decoder).values():
                parameter.add_(0.3 * torch.randn_like(parameter))
        found[name] = folder / name.replace("/", "-")
        write_peft(found[name], decoder, family("llama"), str(found["base"]))
    return found


@pytest.fixture(scope="module")
def http(paths: dict[str, Path]) -> Iterator[httpx2.Client]:
    """A client of a server of the base and two adapters, which guesses tokens."""
    _, named = parsed_adapters([f"{name}={paths[name]}" for name in MODELS[1:]], "base")
    with serving_here(paths["base"], adapters=named, speculate=3) as url:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx2.Client(base_url=url, headers=headers, timeout=60) as found:
            yield found


def test_adapters_are_models_for_clients(http: httpx2.Client) -> None:
    listed = http.get("/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [
        ("base", None),
        ("team/sql", "base"),
        ("json", "base"),
    ]
    assert http.get("/models/team/sql").json() == listed[1]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    routes = {"/completions": {"prompt": "a"}, "/chat/completions": chat, "/responses": RESPONSE}
    for route, body in routes.items():
        for name in MODELS:
            assert http.post(route, json={"model": name, **body}).json()["model"] == name
        refused = http.post(route, json={"model": "sql", **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_each_has_its_own_bytes_whatever_else_is_served(
    http: httpx2.Client, paths: dict[str, Path]
) -> None:
    """Prompts are common to all models, so that a shared cache block would be noticed."""
    pick = random.Random(0)
    texts = [pick.choice((COMMON, 2 * COMMON)) + "x" * pick.randint(1, 30) for _ in range(5)]
    common = {"max_tokens": 20, "logprobs": 0, "chat_logprobs": True, "seed": 0, "ignore_eos": True}
    asked = [
        {"model": name, "prompt": text, "temperature": temperature, "n": 2, **common}
        for name in MODELS
        for text in texts
        for temperature in (0, 0.8)
    ]

    def choices(body: dict) -> list:
        answer = http.post("/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    alone = [choices(body) for body in asked]
    with ThreadPoolExecutor(12) as pool:
        order = pick.sample(range(len(asked)), len(asked))
        for n, found in zip(order, pool.map(choices, (asked[n] for n in order)), strict=True):
            assert found == alone[n], asked[n]
    for name in MODELS:
        adapter = None if name == "base" else paths[name]
        model = workhorse.load(paths["base"], adapter=adapter, notify=print)
        config = GenerationConfig(temperature=0, max_new_tokens=20, logprobs=0, stop_tokens=())
        for body, found in zip(asked, alone, strict=True):
            if (body["model"], body["temperature"]) == (name, 0):
                prompt = list(body["prompt"].encode())
                (loaded,) = generate(model.backend, [prompt], config)
                served = found[0]["logprobs"]["content"]
                assert [one["token_id"] for one in served] == list(loaded.tokens)
                torch.testing.assert_close(
                    [one["logprob"] for one in served],
                    [one.logprob for one in loaded.logprobs],
                    rtol=1e-4,
                    atol=1e-4,
                )


@pytest.mark.parametrize("exact", ["auto", "always", "never"])
def test_what_is_said_of_exactness_covers_all_adapters(paths: dict[str, Path], exact: str) -> None:
    def said(*names: str) -> bool:
        adapters = {name: str(paths[name]) for name in names}
        settings = EngineSettings(str(paths["base"]), adapters=adapters, exact=exact)
        return build(settings)[1].is_exact

    native = workhorse.load(paths["base"], exact=True, notify=print).backend.is_invariant
    expected = {"auto": native, "always": True, "never": False}[exact]
    assert said("team/sql", "json") == expected
    assert said("team/sql", "dora") == (exact == "always")


def test_the_memory_counts_adapters(paths: dict[str, Path]) -> None:
    settings = EngineSettings(str(paths["base"]))
    adapters = {"a": str(paths["team/sql"]), "b": str(paths["json"])}
    more = fit(EngineSettings(str(paths["base"]), adapters=adapters)).weights
    elements = 2 * 4 * (4 * 32 + 3 * 48) + 2 * 2 * (32 + 48) + 257 * 16
    assert more - fit(settings).weights == 4 * elements


REFUSED = {
    "--adapter base={sql}": "the name 'base' is already in use; choose another name",
    "--adapter a={sql} --adapter a={sql}": "the name 'a' is already in use; choose another name",
    "--adapter ={sql}": "has an empty name or path; give NAME=PATH",
    "--adapter a=": "has an empty name or path; give NAME=PATH",
    "--adapter {sql} --adapter a={sql}": "has no name and is not the only one; give NAME=",
    "--check --adapter a={sql}x": "is not an adapter: neither",
}


@pytest.mark.parametrize("options", REFUSED)
def test_wrong_adapters_are_refused(
    options: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = options.format(sql=paths["team/sql"]).split()
    assert main(["serve", str(paths["base"]), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert REFUSED[options] in line


def test_the_engine_names_an_adapter_that_cannot_be_served(paths: dict[str, Path]) -> None:
    with pytest.raises(WorkhorseError, match=r"^adapter a: .*base has an adapter; add .* to its"):
        build(
            EngineSettings(
                str(paths["base"]), adapter=str(paths["dora"]), adapters={"a": str(paths["json"])}
            )
        )
