"""A model for EleutherAI's lm-evaluation-harness: it answers the three kinds of requests.

The harness defines what the numbers mean. Where texts are cut, how an empty context begins and
where an answer ends is therefore as in its `hf` model, and so are the scores.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from workhorse.data import DataConfig, beginning_token
from workhorse.errors import WorkhorseError, nearest
from workhorse.evaluate.evaluation import check_causal
from workhorse.evaluate.scoring import Question, Score, by_length, score
from workhorse.generate import Completion, GenerationConfig, generate
from workhorse.nn import Decoder
from workhorse.tokenizers import ChatTemplate, Tokenizer

WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Sampling options that a task may give although it asks for greedy decoding; the harness then
ignores them, and so do we."""
OPTIONS = {
    **{name: name for name in (*WHEN_SAMPLING, "repetition_penalty")},
    "num_beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
}
"""The harness's names for options, and ours."""
ELSEWHERE = ("do_sample", "until", "max_gen_toks")


@dataclass
class Answers:
    """The model that answers, and its limits."""

    decoder: Decoder
    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    stop_tokens: Sequence[int]
    """Texts that end every answer."""
    max_length: int
    """Most tokens of a prompt and its answer together."""
    batch_size: int | None
    shortened: int = 0
    """Number of prompts truncated on the left to make room for the answer."""


def answer(
    asked: Answers, requests: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[int, str]]:
    """Answer prompts: those with equal options together, the longest first.

    Args:
        asked: the model that answers.
        requests: prompts, each with the harness's `generation_kwargs`. Equal prompts get different
            answers if they are sampled; the seeds come from torch's generator, which the harness
            seeds.

    Yields:
        The number of a request and its answer, up to the first stop.

    Raises:
        WorkhorseError: an unknown option, or no room for the prompt.
    """
    alike: dict[str, list[int]] = {}
    for number, (_, options) in enumerate(requests):
        alike.setdefault(json.dumps(options, sort_keys=True, default=str), []).append(number)
    for numbers in alike.values():
        options = cast(dict[str, Any], normalize_gen_kwargs(dict(requests[numbers[0]][1])))
        config = _config(asked, options)
        room = asked.max_length - config.max_new_tokens
        if room < 1:
            raise WorkhorseError(
                f"max_gen_toks={config.max_new_tokens} leaves no room for a prompt in the context "
                f"of {asked.max_length} tokens; lower max_gen_toks in the task's generation_kwargs"
            )
        same: dict[tuple[int, ...], list[int]] = {}
        for number in numbers:
            tokens = asked.encode(requests[number][0])
            asked.shortened += len(tokens) > room
            same.setdefault(tuple(tokens[-room:]), []).append(number)
        for number, completion in _completions(asked, config, same):
            ended = completion.finish_reason == "eos"
            # By itself, as the harness decodes it: a space after the prompt may be lost.
            text = asked.tokenizer.decode(
                completion.tokens[: -1 if ended else None], skip_special=True
            )
            yield number, postprocess_generated_text(text, options["until"], think_end_token=None)


def _completions(
    asked: Answers, config: GenerationConfig, same: Mapping[tuple[int, ...], Sequence[int]]
) -> Iterator[tuple[int, Completion]]:
    """The answer to each request; `same` maps each prompt to the numbers of its requests."""
    prompts = sorted(same, key=lambda prompt: (-len(prompt), prompt))
    if config.samples:
        for prompt in prompts:  # one at a time, for each to have draws of its own
            seed = int(torch.randint(2**31, ()))
            drawn = config.replace(seed=seed, n_samples=len(same[prompt]))
            found = generate(asked.decoder, [prompt], drawn, tokenizer=asked.tokenizer)
            yield from zip(same[prompt], found, strict=True)
        return
    device = asked.decoder.device
    for batch in by_length(prompts, asked.batch_size, device, room=config.max_new_tokens):
        found = generate(
            asked.decoder, batch, config, tokenizer=asked.tokenizer, batch_size=len(batch)
        )
        for prompt, completion in zip(batch, found, strict=True):
            yield from ((number, completion) for number in same[prompt])


def _config(asked: Answers, options: Mapping[str, Any]) -> GenerationConfig:
    """Our config for the harness's options, which the harness has normalised."""
    for name in options:
        if name not in OPTIONS and name not in ELSEWHERE:
            remedy = nearest(name, [*OPTIONS, *ELSEWHERE])
            raise WorkhorseError(f"generation_kwargs has {name!r}, which is unknown; {remedy}")
    draws = options["do_sample"]
    named = {
        ours: options[name]
        for name, ours in OPTIONS.items()
        if options.get(name) is not None and (draws or name not in WHEN_SAMPLING)
    }
    searches = named.get("beams", 1) > 1
    if not draws and not searches:
        named["temperature"] = 0.0
    # A special token never shows in an answer's text, so it must stop by its id.
    special = asked.tokenizer.special_tokens
    texts = tuple(stop for stop in options["until"] if stop and stop not in special)
    tokens = (*asked.stop_tokens, *(special[stop] for stop in options["until"] if stop in special))
    return GenerationConfig(
        max_new_tokens=options["max_gen_toks"],
        stop=() if searches else texts,  # a search knows its text at the end, where it is cut
        stop_tokens=tuple(dict.fromkeys(tokens)),
        **named,
    )


Progress = Callable[[str], AbstractContextManager[Callable[[int, int | None], None]]]
"""`with progress(label) as report`, then `report(done, total)`, in requests."""


@contextmanager
def silent(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Progress that is not shown."""
    del label
    yield lambda done, total: None


class Evaluated(Protocol):
    """What is needed of a model; `workhorse.model.model.Model` has it."""

    @property
    def name(self) -> str: ...
    @property
    def decoder(self) -> Decoder: ...
    @property
    def text(self) -> Tokenizer: ...
    @property
    def data(self) -> DataConfig | None: ...
    @property
    def prefix(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int | None: ...
    @property
    def stop_tokens(self) -> tuple[int, ...]: ...


class HarnessModel(TemplateLM):
    """Answers the harness's requests with a model.

        lm_eval.simple_evaluate(HarnessModel(workhorse.load("runs/first")), tasks=["arc_easy"])

    Names of special tokens in a task's text become these tokens, as in the `hf` model: that is how
    a rendered chat comes back from the harness.

    Args:
        model: the model.
        progress: shows the progress of each kind of request.
        batch_size: texts in a forward pass; by default as many as suit the device.
        max_length: most tokens read of a text; the model's context by default.

    Raises:
        WorkhorseError: attention that sees the future, no tokenizer, or a `max_length` beyond the
            context.
    """

    def __init__(
        self,
        model: Evaluated,
        *,
        progress: Progress = silent,
        batch_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        check_causal(model.decoder)
        context = model.decoder.max_seq_len
        if max_length is not None and not 1 <= max_length <= context:
            raise WorkhorseError(f"max_length={max_length} is not within 1 to {context}; choose so")
        self.tokenizer = model.text
        self.max_length = max_length or context
        self.batch_size = batch_size
        self.shortened = 0
        """Number of requests truncated on the left because they did not fit."""
        self._model = model
        self._progress = progress
        self._device = model.decoder.device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        eos = self.tokenizer.eos_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context.

        For a run of ours, the token that training put there; for a model from elsewhere bos or else
        eos, whatever its tokenizer puts before a text: as in the harness.
        """
        from_elsewhere = self._model.data is None
        found = beginning_token(self.tokenizer) if from_elsewhere else self._model.start
        if found is None:
            raise WorkhorseError(
                f"the task has a text without a context, and {self._model.name} knows no token "
                "that begins a text; give it another task"
            )
        return found

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches prepared requests."""
        facts = f"{self.tokenizer.fingerprint} {self.tokenizer.chat_template}"
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def get_model_info(self) -> dict[str, Any]:
        """What the results report about the model."""
        weights = list(self._model.decoder.parameters())
        return {
            "model_name": self._model.name,
            "model_num_parameters": sum(weight.numel() for weight in weights),
            "model_dtype": str(weights[0].dtype),
            "max_length": self.max_length,
            "shortened_requests": self.shortened,
        }

    def check_chat(self) -> None:
        """Refuse chats if the model has no template for them.

        Raises:
            WorkhorseError: it has none.
        """
        if not self.tokenizer.chat_templates:
            raise WorkhorseError(
                f"{self._model.name} has no chat template; evaluate it on the plain text"
            )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """The tokens of a text, with the model's beginning unless the text has it already."""
        tokens = self.tokenizer.encode(string, allow_special=True)
        prefix = self._model.prefix
        if add_special_tokens is False or tuple(tokens[: len(prefix)]) == prefix:
            return tokens
        return [*prefix, *tokens]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether greedy gives it."""
        return super().loglikelihood(list(requests), disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, each window with as much context as fits."""
        questions: list[Question] = []
        owners: list[int] = []
        texts: list[str] = [request.args[0] for request in requests]
        for owner, text in enumerate(texts):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in windows:
                questions.append(Question(*make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(texts)
        scores = self._scores("windows of texts", questions, lambda number, found: None)
        for owner, found in zip(owners, scores, strict=True):
            totals[owner] += found.logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The generated text after each context, up to a stop."""
        asked = Answers(
            self._model.decoder,
            self.tokenizer,
            encode=self.tok_encode,
            stop_tokens=self._model.stop_tokens or (self.eot_token_id,),
            max_length=self.max_length,
            batch_size=self.batch_size,
        )
        texts = [""] * len(requests)
        done = 0
        with self._progress("generating") as report:
            for number, text in answer(asked, [request.args for request in requests]):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                done += 1
                report(done, len(requests))
        self.shortened += asked.shortened
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat; without a generation prompt, its last message will be continued."""
        self.check_chat()
        template = ChatTemplate.of(self.tokenizer)
        try:
            text = template.render(chat_history, add_generation_prompt)
        except WorkhorseError:
            # Many templates refuse a system message; the harness then leaves it out.
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            text = template.render(rest, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        ends = last if last in text else last.strip()
        return text[: text.rindex(ends) + len(ends)]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        **_: object,
    ) -> list[tuple[float, bool]]:
        def keep(number: int, found: Score) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[number][0], tuple(found))

        questions = [Question(context, following) for _, context, following in requests]
        scores = self._scores("log-likelihoods", questions, keep)
        return [(found.logprob, found.is_greedy) for found in scores]

    def _scores(
        self, label: str, questions: Sequence[Question], keep: Callable[[int, Score], None]
    ) -> list[Score]:
        """The scores of questions, in order; `keep` gets each as soon as it is known."""
        found: dict[int, Score] = {}
        batches = score(
            self._model.decoder,
            questions,
            max_length=self.max_length,
            batch_size=self.batch_size,
        )
        with self._progress(label) as report:
            for batch in batches:
                for number, one in batch:
                    found[number] = one
                    keep(number, one)
                report(len(found), len(questions))
        self.shortened += sum(
            len(context) + len(continuation) > self.max_length + 1
            for context, continuation in questions
        )
        return [found[number] for number in range(len(questions))]
