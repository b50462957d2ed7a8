"""A model for EleutherAI's lm-evaluation-harness.

To get the same scores as the harness's `hf` model, truncation, the token before an empty context,
and the end of a completion are the same as in that model.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from workhorse.data import start_token
from workhorse.errors import WorkhorseError, nearest
from workhorse.evaluate.evaluation import check_causal
from workhorse.evaluate.scoring import Question, Score, by_length, score
from workhorse.execute.backend import Backend
from workhorse.generate import Completion, GenerationConfig, generate
from workhorse.generate.options import stored
from workhorse.tokenizers import ChatTemplate

if TYPE_CHECKING:
    from workhorse.model.model import Model

WHEN_SAMPLING = stored("do_sample")
"""Sampling options. With greedy decoding they are ignored, as in the harness."""
OPTIONS = {
    **{name: name for name in stored("always", "do_sample")},
    "num_beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
}
"""Fields of `GenerationConfig` by the name of the option in the harness."""
ELSEWHERE = ("do_sample", "until", "max_gen_toks")


def answer(
    asked: "HarnessModel", requests: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[int, str]]:
    """Generate completions of prompts. Prompts with equal options are batched, longest first.

    Args:
        asked: the model.
        requests: prompts, each with the harness's `generation_kwargs`. If they are sampled, equal
            prompts get different completions. The seeds come from torch's generator, which the
            harness seeds.

    Yields:
        The index of a request and its completion, up to the first stop string.

    Raises:
        WorkhorseError: an option is unknown, or `max_gen_toks` leaves no room for a prompt.
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
            tokens = asked.tok_encode(requests[number][0])
            asked.shortened += len(tokens) > room
            same.setdefault(tuple(tokens[-room:]), []).append(number)
        for number, completion in _completions(asked, config, same):
            ended = completion.finish_reason == "eos"
            # Decoded without the prompt, as in the harness: a space after the prompt may be lost.
            text = asked.tokenizer.decode(
                completion.tokens[: -1 if ended else None], skip_special=True
            )
            yield number, postprocess_generated_text(text, options["until"], think_end_token=None)


def _completions(
    asked: "HarnessModel", config: GenerationConfig, same: Mapping[tuple[int, ...], Sequence[int]]
) -> Iterator[tuple[int, Completion]]:
    """Yield the index and the completion of each request.

    `same` maps each distinct prompt, as token ids, to the indices of its requests.
    """
    prompts = sorted(same, key=lambda prompt: (-len(prompt), prompt))
    if config.samples:
        for prompt in prompts:  # one at a time, so that each has its own seed
            seed = int(torch.randint(2**31, ()))
            drawn = config.replace(seed=seed, n_samples=len(same[prompt]))
            found = generate(asked.backend, [prompt], drawn, tokenizer=asked.tokenizer)
            yield from zip(same[prompt], found, strict=True)
        return
    device = asked.backend.decoder.device
    for batch in by_length(prompts, asked.batch_size, device, room=config.max_new_tokens):
        found = generate(
            asked.backend, batch, config, tokenizer=asked.tokenizer, batch_size=len(batch)
        )
        for prompt, completion in zip(batch, found, strict=True):
            yield from ((number, completion) for number in same[prompt])


def _config(asked: "HarnessModel", options: Mapping[str, Any]) -> GenerationConfig:
    """Convert the harness's normalised options to a `GenerationConfig`."""
    for name in options:
        if name not in OPTIONS and name not in ELSEWHERE:
            remedy = nearest(name, [*OPTIONS, *ELSEWHERE])
            raise WorkhorseError(f"unknown option {name!r} in generation_kwargs; {remedy}")
    draws = options["do_sample"]
    named = {
        ours: options[name]
        for name, ours in OPTIONS.items()
        if options.get(name) is not None and (draws or name not in WHEN_SAMPLING)
    }
    searches = named.get("beams", 1) > 1
    if not draws and not searches:
        named["temperature"] = 0.0
    # Special tokens are removed from the decoded completion, so they must stop it by their ids.
    special = asked.tokenizer.special_tokens
    texts = tuple(stop for stop in options["until"] if stop and stop not in special)
    tokens = (*asked.stop_tokens, *(special[stop] for stop in options["until"] if stop in special))
    return GenerationConfig(
        max_new_tokens=options["max_gen_toks"],
        stop=() if searches else texts,  # beam search is cut at stop strings afterwards
        stop_tokens=tuple(dict.fromkeys(tokens)),
        **named,
    )


Progress = Callable[[str], AbstractContextManager[Callable[[int, int | None], None]]]
"""A progress display: `with progress(label) as report`, then `report(done, total)` with numbers of
requests."""


@contextmanager
def silent(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress display that shows nothing."""
    del label
    yield lambda done, total: None


class HarnessModel(TemplateLM):
    """Model for lm-evaluation-harness.

        model = HarnessModel(workhorse.load("runs/stdlib-small"))
        lm_eval.simple_evaluate(model, tasks=["arc_easy"])

    The names of special tokens in a task's strings, such as rendered chats, are encoded as special
    tokens, as in the harness's `hf` model.

    Args:
        model: the model.
        progress: shows the progress of each kind of request.
        batch_size: the number of sequences in a forward pass; by default chosen for the device.
        max_length: the maximum number of tokens of a sequence; the model's context by default.

    Raises:
        WorkhorseError: attention is not causal, the model has no tokenizer, or `max_length` is
            longer than the context.
    """

    def __init__(
        self,
        model: "Model",
        *,
        progress: Progress = silent,
        batch_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        check_causal(model.decoder)
        context = model.decoder.max_seq_len
        if max_length is not None and not 1 <= max_length <= context:
            raise WorkhorseError(f"max_length={max_length} is not valid; choose 1 to {context}")
        self.tokenizer = model.text
        self.max_length = max_length or context
        self.batch_size = batch_size
        self.shortened = 0
        """Number of requests truncated on the left because they did not fit."""
        self._model = model
        self._progress = progress
        self._device = model.decoder.device

    @property
    def backend(self) -> Backend:
        """The way in which the model generates."""
        return self._model.backend

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end every completion."""
        return self._model.stop_tokens or (self.eot_token_id,)

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a document: eos, or `prefix_token_id` if eos is missing."""
        eos = self.tokenizer.eos_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that the model sees before a string without context.

        For a run of this library, it is the token that training put before documents. For any
        other model it is bos, or eos for a tokenizer without bos, as in the harness.
        """
        from_elsewhere = self._model.data is None
        found = start_token(self.tokenizer) if from_elsewhere else self._model.start
        if found is None:
            raise WorkhorseError(
                f"the task scores a string without context, but {self._model.name} has no token "
                "that begins a document; choose another task"
            )
        return found

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches prepared requests."""
        facts = f"{self.tokenizer.fingerprint} {self.tokenizer.chat_template}"
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def get_model_info(self) -> dict[str, Any]:
        """Return properties of the model to include in the results."""
        weights = list(self._model.decoder.parameters())
        return {
            "model_name": self._model.name,
            "model_num_parameters": sum(weight.numel() for weight in weights),
            "model_dtype": str(weights[0].dtype),
            "max_length": self.max_length,
            "shortened_requests": self.shortened,
        }

    def check_chat(self) -> None:
        """Check that the model has a chat template.

        Raises:
            WorkhorseError: it has no chat template.
        """
        if not self.tokenizer.chat_templates:
            raise WorkhorseError(
                f"{self._model.name} has no chat template; evaluate it without chat"
            )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encode a string and add the model's prefix tokens unless the string begins with them."""
        tokens = self.tokenizer.encode(string, allow_special=True)
        prefix = self._model.prefix
        if add_special_tokens is False or tuple(tokens[: len(prefix)]) == prefix:
            return tokens
        return [*prefix, *tokens]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Compute each continuation's log-probability, and whether greedy decoding generates it.

        `disable_tqdm` is ignored, because `progress` shows the progress.
        """
        return super().loglikelihood(list(requests), disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Compute the log-probability of whole strings, in windows of up to `max_length` tokens."""
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
        scores = self._scores("rolling windows", questions, lambda number, found: None)
        for owner, found in zip(owners, scores, strict=True):
            totals[owner] += found.logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a completion of each context, up to a stop string."""
        texts = [""] * len(requests)
        done = 0
        with self._progress("generating") as report:
            for number, text in answer(self, [request.args for request in requests]):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                done += 1
                report(done, len(requests))
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat as a string. Without a generation prompt, it ends with the last message."""
        self.check_chat()
        template = ChatTemplate.of(self.tokenizer)
        try:
            text = template.render(chat_history, add_generation_prompt)
        except WorkhorseError:
            # Many templates do not support a system message; the harness then omits it.
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
        """Return the score of each question, in the given order.

        `keep` is called with the index of a question and its score as soon as the score is known.
        """
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
