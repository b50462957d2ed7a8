"""An answer has the same bytes whatever else is served, and with and without guesses."""

import random
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.serve.conftest import CONTEXT, MODEL, Served, serving

COMMON = "the same beginning of several prompts, longer than a block of the cache; "
COUNTS = 8, 24
"""Number of requests: the default suite has the first one."""


def bodies(pick: random.Random, count: int) -> list[tuple[str, dict]]:
    """Requests of both routes, of all lengths, with common prefixes and every kind of sampling."""
    made = []
    for seed in range(count):
        text = pick.choice(("", COMMON, 2 * COMMON)) + "x" * pick.randint(1, 40)
        body = {
            "model": MODEL,
            "max_tokens": pick.randint(1, CONTEXT - len(text) - 20),
            "seed": seed,
            "temperature": pick.choice((0, 0.7, 1.3)),
            "top_p": pick.choice((1, 0.9)),
            "frequency_penalty": pick.choice((0, 0.3)),
            "n": pick.choice((1, 2)),
            "ignore_eos": pick.random() < 0.5,
        }
        if not body["ignore_eos"] and pick.random() < 0.5:
            body |= {"structured_outputs": {"regex": "(ab|[c-e]{3} |é)*"}}
        if pick.random() < 0.5:
            body |= {"prompt": text, "logprobs": 2, "echo": pick.random() < 0.5}
            made.append(("/v1/completions", body))
        else:
            body |= {"messages": [{"role": "user", "content": text}]}
            made.append(("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2}))
    return made


@pytest.mark.parametrize("count", COUNTS)
def test_answers_have_the_same_bytes_whatever_else_is_served(
    http: httpx2.Client, count: int
) -> None:
    compare(http, http, count, rounds=3)


@pytest.mark.parametrize("count", COUNTS)
def test_answers_with_guesses_have_the_same_bytes(
    http: httpx2.Client, served: Served, count: int
) -> None:
    with serving(served.folder, "--speculate", "4") as url:
        guessing = httpx2.Client(base_url=url.removesuffix("/v1"), headers=http.headers, timeout=60)
        with guessing:
            compare(http, guessing, count, rounds=1)
            figures = dict(
                line.split()
                for line in guessing.get("/metrics").text.splitlines()
                if line[0] != "#"
            )
    proposed, accepted = (
        float(figures[f"workhorse_{name}_tokens_total"]) for name in ("proposed", "accepted")
    )
    assert 0 < accepted < proposed


def compare(plain: httpx2.Client, http: httpx2.Client, count: int, rounds: int) -> None:
    """Compare answers beside others of `http` with answers alone of `plain`."""
    pick = random.Random(3)
    asked = bodies(pick, count)

    def choices(request: tuple[str, dict], http: httpx2.Client = http) -> object:
        path, body = request
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def leaving(request: tuple[str, dict]) -> None:
        path, body = request
        with http.stream("POST", path, json=body | {"stream": True}) as answer:
            next(answer.iter_bytes())

    alone = [choices(request, plain) for request in asked]
    with ThreadPoolExecutor(12) as pool:
        for _ in range(rounds):
            order = pick.sample(range(len(asked)), len(asked))
            gone = [pool.submit(leaving, asked[n]) for n in order[:6]]
            together = pool.map(choices, (asked[n] for n in order))
            for n, found in zip(order, together, strict=True):
                assert found == alone[n], asked[n]
            for one in gone:
                one.result()
