"""`generate` and `stream`: completions of a list of prompts."""

from collections.abc import Iterator, Sequence

from workhorse.config.arguments import integer
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend
from workhorse.generate.beam import beam_search
from workhorse.generate.checks import (
    StreamingTokenizer,
    check_draft,
    check_prompts,
    checked_config,
    checked_models,
    prompt_list,
)
from workhorse.generate.config import Completion, Delta, GenerationConfig
from workhorse.generate.engine import Engine
from workhorse.generate.limits import slack_of
from workhorse.generate.runner import tokens_needed
from workhorse.nn import Decoder, evaluation_mode


def generate(
    decoder: Decoder | Backend,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig | None = None,
    *,
    tokenizer: StreamingTokenizer | None = None,
    draft: Decoder | Backend | None = None,
    batch_size: int = 32,
) -> list[Completion]:
    """Generate completions of each prompt.

    Args:
        decoder: the model; dropout is off while it generates. A decoder's modules are called; a
            backend (`Model.backend`) may be faster.
        prompts: token ids; lengths may differ.
        config: the options; None: the defaults of `GenerationConfig`.
        tokenizer: decodes tokens, and defines eos and the number of ids in use. None: completions
            have no text, and no eos token ends them.
        draft: a smaller decoder with the same vocabulary, which guesses `config.speculate` tokens
            at a time. None: guesses are looked up in the prompt and the completion.
        batch_size: the maximum number of completions decoded together; affects speed and memory,
            not the completions.

    Returns:
        The completions in the order of the prompts; the samples of a prompt are adjacent.

    Raises:
        WorkhorseError: see `check_prompts`, `check_draft` and `check_exact`; or `batch_size` is
            less than 1, or logits are not finite.
    """
    config, prompts = checked_config(config).with_seed(), prompt_list(prompts)
    if config.beams > 1:
        return _searched(
            decoder, prompts, config, tokenizer=tokenizer, draft=draft, batch_size=batch_size
        )
    results: list[list[Delta]] = [[] for _ in range(len(prompts) * config.n_samples)]
    for delta in stream(
        decoder, prompts, config, tokenizer=tokenizer, draft=draft, batch_size=batch_size
    ):
        results[delta.index].append(delta)
    return [
        _completion(
            deltas,
            prompt_tokens=len(prompts[index // config.n_samples]),
            seed=(config.seed or 0) + index % config.n_samples if config.samples else None,
            speculated=config.speculate > 0,
            decoded=tokenizer is not None,
        )
        for index, deltas in enumerate(results)
    ]


def stream(
    decoder: Decoder | Backend,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig | None = None,
    *,
    tokenizer: StreamingTokenizer | None = None,
    draft: Decoder | Backend | None = None,
    batch_size: int = 32,
) -> Iterator[Delta]:
    """Generate completions of each prompt, and yield their tokens one by one.

    For the arguments see `generate`. The text of a completion is the concatenation of the text of
    its deltas. The decoder is in evaluation mode during each step, and in its former mode between
    steps.

    Raises:
        WorkhorseError: see `generate`, raised at the call; or the config asks for beam search,
            which cannot emit tokens one by one.
    """
    config = checked_config(config).with_seed()
    batch_size = integer("batch_size", batch_size, 1)
    backend, draft = checked_models(decoder, draft, tokenizer)
    if config.beams > 1:
        raise WorkhorseError(
            f"beams={config.beams} cannot be streamed: beam search returns its text only at the "
            "end; set beams=1"
        )
    context = backend.decoder.max_seq_len
    checked = check_prompts(backend.decoder, prompt_list(prompts), config, tokenizer)
    at_once = max(1, min(batch_size // config.n_samples, len(checked)))
    slack, new = slack_of(config, context), config.max_new_tokens - 1
    needs = sorted(tokens_needed(len(prompt), new, context, slack) for prompt in checked)
    engine = Engine(
        backend,
        tokenizer=tokenizer,
        draft=draft,
        max_sequences=at_once * config.n_samples,
        max_tokens=max(1, sum(needs[-at_once:]) * config.n_samples),
        speculate=slack,
    )
    for prompt in checked:
        engine.add(prompt, config, is_checked=True)
    return _deltas(engine)


def _deltas(engine: Engine) -> Iterator[Delta]:
    while not engine.is_idle:
        yield from engine.step()


def _searched(
    decoder: Decoder | Backend,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    tokenizer: StreamingTokenizer | None,
    draft: Decoder | Backend | None,
    batch_size: int,
) -> list[Completion]:
    """Return the best completion of each prompt by beam search."""
    batch_size = integer("batch_size", batch_size, 1)
    backend, draft = checked_models(decoder, draft, tokenizer)
    check_draft(backend, draft, config.speculate, tokenizer)
    check_prompts(backend.decoder, prompts, config, tokenizer)
    step = max(1, batch_size // config.beams)
    with evaluation_mode(backend.decoder):
        return [
            best
            for start in range(0, len(prompts), step)
            for best, *_ in beam_search(
                backend, prompts[start : start + step], config, tokenizer=tokenizer
            )
        ]


def _completion(
    deltas: Sequence[Delta],
    *,
    prompt_tokens: int,
    seed: int | None,
    speculated: bool,
    decoded: bool,
) -> Completion:
    reason = deltas[-1].finish_reason
    assert reason is not None, "every completion ends with a reason"
    logprobs = tuple(delta.logprob for delta in deltas if delta.logprob is not None)
    return Completion(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(delta.token for delta in deltas),
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        seed=seed,
        logprobs=logprobs or None,
        prompt_logprobs=deltas[0].prompt_logprobs,
        proposed=sum(delta.proposed for delta in deltas) if speculated else None,
        accepted=sum(delta.accepted for delta in deltas) if speculated else None,
        prompt_seconds=sum(delta.prompt_seconds for delta in deltas),
        decoded=decoded,
    )
