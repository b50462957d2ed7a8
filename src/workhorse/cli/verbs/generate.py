"""`workhorse generate`: continue prompts with a model."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workhorse.cli.loading import (
    MOST_ROWS,
    PATH,
    Running,
    announce,
    json_option,
    model_options,
    open_model,
)
from workhorse.cli.output import for_terminal, print_result, status
from workhorse.cli.sampling import (
    draft_options,
    generation_config,
    prompt_seconds,
    read_prompts,
    sampling_options,
    speed,
    warn_of_unknown,
    with_sampling,
)

if TYPE_CHECKING:
    from workhorse.generate import Completion, Delta, GenerationConfig, TokenLogprob
    from workhorse.model.model import Model

SHOWN_PROMPT = 40
"""Maximum number of characters of a prompt in the heading of its completion."""


@click.command("generate")
@model_options
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Prompt to continue; - reads it from stdin. Repeatable.",
)
@click.option(
    "--prompt-file",
    type=PATH,
    metavar="FILE",
    help="A text file with one prompt, or a .jsonl file with a `prompt` in each line.",
)
@sampling_options("generate")
@draft_options
@click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-sequence token.")
@click.option(
    "--batch-size",
    type=click.IntRange(1, MOST_ROWS),
    help="Completions decoded at once.  [default: 32]",
)
@click.option("--stream", "as_stream", is_flag=True, help="Print the output as it is generated.")
@json_option
def command(
    *,
    model: str,
    running: Running,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    draft: str | None,
    ignore_eos: bool,
    batch_size: int | None,
    as_stream: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a prompt with MODEL.

    MODEL is a run directory, a Hugging Face directory or hub id, a GGUF file, a folder that
    `convert` wrote, or a preset's name (random weights). The completion, without the prompt, goes
    to stdout; the speed and the reason for stopping go to stderr.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if options[name] is not None and not as_json:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} only appear in the JSON result; add --json")
    texts = read_prompts(prompts, prompt_file)
    if as_stream:
        _check_one_text(
            len(texts),
            {"--json": as_json, "--n-samples": options["n_samples"], "--batch-size": batch_size},
        )
    config = generation_config(**options, stop_tokens=() if ignore_eos else None)
    if as_stream and config.beams > 1:
        raise click.UsageError(
            "--beams and --stream conflict: beam search has no output before its end; remove one"
        )
    config = config.with_seed()
    loaded = open_model(model, running, exact=config.exact)
    config = with_sampling(config, loaded, options)
    warn_of_unknown(loaded, texts)
    guesser = None
    if draft is not None:
        guesser = open_model(draft, running, with_text=False)
    if running.execution == "compiled":  # warm up: tokens/s must not include the compilation
        with status() as show:
            show("compiling; takes tens of seconds the first time on a machine")
            loaded.generate_batch(texts[:1], config.replace(max_new_tokens=2), draft=guesser)
    if as_stream:
        _stream(loaded, texts[0], config, guesser)
        return
    started = time.perf_counter()
    completions = loaded.generate_batch(texts, config, draft=guesser, batch_size=batch_size or 32)
    seconds = time.perf_counter() - started
    rates = speed([len(c.tokens) for c in completions], seconds, prompt_seconds(completions))
    result = _result(completions, texts, rates, config, loaded)
    print_result(result, as_json, text=for_terminal(_page(result["completions"])))
    announce(loaded)
    _explain([(c.finish_reason, len(c.tokens)) for c in completions], rates, config)


def _check_one_text(prompts: int, flags: Mapping[str, Any]) -> None:
    """Raise an error if `--stream` is combined with several prompts or with conflicting flags.

    `flags` has the values of the flags that conflict with `--stream`.
    """
    extra = [flag for flag, value in flags.items() if value not in (None, False)]
    remedies = [f"remove {', '.join(extra)}"] if extra else []
    remedies += [f"give one prompt, not {prompts}"] if prompts > 1 else []
    if remedies:
        raise click.UsageError(f"--stream prints one completion; {' and '.join(remedies)}")


def _stream(model: "Model", prompt: str, config: "GenerationConfig", draft: "Model | None") -> None:
    started = time.perf_counter()
    deltas: list[Delta] = []
    for delta in model.stream(prompt, config, draft=draft):
        print(for_terminal(delta.text), end="", flush=True)
        deltas.append(delta)
    print()
    rates = speed([len(deltas)], time.perf_counter() - started, prompt_seconds(deltas))
    announce(model)
    _explain([(deltas[-1].finish_reason or "", len(deltas))], rates, config)


def _explain(
    ends: Sequence[tuple[str, int]], rates: dict[str, Any], config: "GenerationConfig"
) -> None:
    """Print on stderr the number of tokens, the speed and the reasons for stopping.

    `ends` has the reason for stopping and the number of tokens of each completion.
    """
    tokens = sum(n for _, n in ends)
    reasons = ", ".join(sorted({reason for reason, _ in ends}))
    rate = rates["tokens_per_second"]
    fast = "" if rate is None else f", {rate:.1f} tokens/s"
    after = f" after {rates['prompt_seconds']:.2f} s for the prompt"
    seed = f", seed {config.seed}" if config.samples else ""
    print(f"{tokens} tokens{fast}{after}, stopped by {reasons}{seed}", file=sys.stderr)
    if any(reason == "length" and n < config.max_new_tokens for reason, n in ends):
        print("note: the context is full; continue past it with --truncate left", file=sys.stderr)


def _result(
    completions: Sequence["Completion"],
    prompts: Sequence[str],
    rates: dict[str, Any],
    config: "GenerationConfig",
    model: "Model",
) -> dict[str, Any]:
    """The result of the verb: totals, and a mapping for each completion in `completions`.

    If there is only one completion, its fields are also at the top level.
    """
    listed = [
        {
            "prompt": prompts[index // config.n_samples],
            "text": completion.text,
            "tokens": len(completion.tokens),
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.tokens),
            "prompt_tokens": completion.prompt_tokens,
            "seed": completion.seed,
            "score": completion.score,
            **_logprobs(completion, prompts[index // config.n_samples], model),
            **_guessed(completion),
        }
        for index, completion in enumerate(completions)
    ]
    tokens = sum(len(completion.tokens) for completion in completions)
    totals = {"tokens": tokens, **rates, "execution": model.announcement}
    return {**(listed[0] if len(listed) == 1 else {}), **totals, "completions": listed}


def _guessed(completion: "Completion") -> dict[str, int | None]:
    """Count the proposed and accepted draft tokens; empty without speculative decoding."""
    if completion.proposed is None:
        return {}
    return {"proposed": completion.proposed, "accepted": completion.accepted}


def _logprobs(completion: "Completion", prompt: str, model: "Model") -> dict[str, Any]:
    """`logprobs` and, if requested, `prompt_logprobs` of a completion."""
    before = model.encode(prompt)
    found: dict[str, Any] = {"logprobs": _with_strings(completion.logprobs, before, model)}
    if completion.prompt_logprobs is not None:
        of_prompt = _with_strings(completion.prompt_logprobs, before[:1], model)
        found["prompt_logprobs"] = of_prompt
    return found


def _with_strings(
    entries: "Sequence[TokenLogprob] | None", before: Sequence[int], model: "Model"
) -> list[dict[str, Any]] | None:
    """The log-probability and the string of each token; None if not requested.

    A string is None if the token is only a part of a character, or if the tokenizer does not have
    its id (the model's vocabulary is padded).
    """
    if entries is None:
        return None
    ids = dict.fromkeys(token for e in entries for token in (e.token, *(one for one, _ in e.top)))
    known = [token for token in ids if token < model.text.vocab_size]
    pieces = {piece.id: piece.text for piece in model.text.pieces([*before, *known])}
    return [
        {
            "token": entry.token,
            "text": pieces.get(entry.token),
            "logprob": entry.logprob,
            "top": [(token, logprob, pieces.get(token)) for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _page(completions: Sequence[dict[str, Any]]) -> str:
    """Format completions for humans: a single one unchanged, several with a heading for each."""
    if len(completions) == 1:
        return completions[0]["text"]
    return "\n\n".join(
        f"--- {number} of {len(completions)}, after {_shortened(completion['prompt'])}\n"
        f"{completion['text']}"
        for number, completion in enumerate(completions, start=1)
    )


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN_PROMPT else f"…{text[-SHOWN_PROMPT:]}")
