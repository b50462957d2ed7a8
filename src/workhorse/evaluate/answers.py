"""Generated answers to prompts, as the evaluation harness asks for them (`generate_until`)."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from workhorse.errors import WorkhorseError, nearest
from workhorse.evaluate.scoring import by_length
from workhorse.generate import Completion, GenerationConfig, generate
from workhorse.nn import Decoder
from workhorse.tokenizers import Tokenizer

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
