"""An engine of fixed step time without a model, in the engine's process, for tests of the server.

Each completion's tokens are the letters of its prompt, again and again. The environment variable
`STEP_SECONDS` sets the time of a step. A prompt that begins with the token of `!` fails, one with
`#` kills the process. Each token has a probability of 0.75, `*` one of 0.2.
"""

import math
import os
import signal
import socket
import sys
import time
from dataclasses import replace

from workhorse.data import SequenceStart
from workhorse.errors import WorkhorseError
from workhorse.generate import Delta, TokenLogprob
from workhorse.generate.limits import Load
from workhorse.generate.scheduler import Scheduler
from workhorse.generate.sequence import TokenSequence
from workhorse.nn.cache.paged import PagedCache
from workhorse.serve.engine_process import serve
from workhorse.serve.messages import ModelFacts
from workhorse.serve.settings import EngineSettings
from workhorse.tokenizers import BytesConfig, train_tokenizer

CONTEXT = 4096


class FakeRequest:
    """The part of a `Request` that the scheduler uses."""

    def __init__(self, index, prompt, config, client, cache) -> None:
        self.has_logprobs = config.logprobs is not None
        self.index, self.client, self.rank = index, client, 0
        self.prompt, self.left = prompt, config.max_new_tokens
        self.copies: list = []
        self.sequence = TokenSequence(prompt, cache)


class FakeEngine:
    """The methods of `Engine` that the server uses, with the real scheduler."""

    def __init__(self, settings: EngineSettings) -> None:
        import torch

        self.seconds = float(os.environ.get("STEP_SECONDS", "0.002"))
        self.cache = PagedCache(
            settings.cache_tokens or 16 * CONTEXT,
            settings.max_sequences,
            torch.device("cpu"),
            CONTEXT,
        )
        self.cache.pool(None)
        self.scheduler = Scheduler(
            self.cache,
            token_budget=4096,
            max_sequences=settings.max_sequences,
            prefix_caching=False,
            prompt_tokens=128,
        )
        self.requests: dict[int, FakeRequest] = {}
        self.added = 0
        self.kept: list[Delta] = []

    @property
    def is_idle(self) -> bool:
        return not (self.requests or self.kept)

    @property
    def unfinished(self):
        return self.requests.keys() | {delta.index for delta in self.kept}

    @property
    def load(self) -> Load:
        (pool,) = self.cache.pools.values()
        used = (pool.capacity - pool.available) / pool.capacity
        return Load(len(self.scheduler.running), len(self.scheduler.waiting), used)

    def add(self, prompt, config, *, client: str, **_) -> range:
        if chr(prompt[0]) == "#":
            os.kill(os.getpid(), signal.SIGKILL)
        request = FakeRequest(self.added, prompt, config, client, self.cache)
        self.requests[self.added] = request
        self.scheduler.add(request)
        self.added += 1
        return range(self.added - 1, self.added)

    def cancel(self, index: int) -> None:
        request = self.requests.pop(index, None)
        if request is not None:
            self.scheduler.remove(request)

    def step(self) -> list[Delta]:
        time.sleep(self.seconds)
        deltas, failed = self.kept, []
        self.kept = []
        for request, count in self.scheduler.schedule():
            request.sequence.cached.length += count
            if request.sequence.pending:
                continue
            if chr(request.prompt[0]) == "!":
                failed.append(request.index)
                continue
            request.left -= 1
            new = len(request.sequence.tokens) - len(request.prompt)
            token = request.prompt[new % len(request.prompt)]
            request.sequence.tokens.append(token)
            reason = None if request.left else "length"
            found = _logprob(token) if request.has_logprobs else None
            deltas.append(Delta(request.index, token, chr(token), found, reason))
            if reason:
                self.cancel(request.index)
        if failed:
            self.kept = deltas  # returned by the next step, as `Engine.step` does
            for index in failed:
                self.cancel(index)
            raise WorkhorseError("the logits are not finite; check the weights")
        return deltas


def _logprob(token: int) -> TokenLogprob:
    likely = math.log(0.75)
    return TokenLogprob(token, likely, ((token, likely), (ord("*"), math.log(0.2))))


def make(settings: EngineSettings):
    tokenizer = train_tokenizer(BytesConfig(), [])
    facts = ModelFacts(
        name=settings.model,
        tokenizer=tokenizer,
        beginning=SequenceStart((), None),
        trained_to_chat=False,
        settings=replace(settings, cache_tokens=settings.cache_tokens or 16 * CONTEXT),
        stop_tokens=(),
        reply_stop_tokens=(),
        sampling={},
        context=CONTEXT,
        vocab=256,
        is_exact=False,
        announcement="decode: fake",
    )
    return FakeEngine(settings), facts


if __name__ == "__main__":
    time.sleep(float(os.environ.get("START_SECONDS", "0")))
    serve(socket.socket(fileno=int(sys.argv[1])), make)
    os._exit(0)
