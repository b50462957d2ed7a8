"""The page that explains a model's forward pass over a prompt: its data, and the HTML file.

The page is one file that loads nothing. A model of up to `LIVE_PARAMETERS` parameters is in it, if
the page's script computes all its parts; then the page runs it on any prompt. All other models are
shown as PyTorch ran them.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from workhorse.config.base import Config
from workhorse.errors import WorkhorseError
from workhorse.files.writing import write_atomically
from workhorse.inspect.attribution import LinearTracer, leaves_of
from workhorse.inspect.heads import WEIGHTS, attention_patterns, head_labels, head_scores
from workhorse.inspect.lens import logit_lens, stream_norms, streams
from workhorse.inspect.trace import Trace, Tracer
from workhorse.memory.model_memory import cache_of_layers
from workhorse.model.model import Model
from workhorse.models.describe import (
    SCORES,
    components_of,
    count_parameters,
    forward_flops,
    tensors_of,
)
from workhorse.nn import Decoder
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.nn.blocks import Block
from workhorse.nn.context import Context
from workhorse.nn.logprobs import log_probabilities
from workhorse.nn.positions.rope import RopeConfig, inverse_powers
from workhorse.tokenizers.control import reachable
from workhorse.transforms.record import transforms_of

TEMPLATE = Path(__file__).with_name("page.html")
LIVE_PARAMETERS = 2_000_000
"""Largest number of parameters of a model that is stored in the page."""
MOST_TOKENS = 128
"""Largest number of tokens of a prompt."""
PAGE_BYTES, LIVE_PAGE_BYTES = 3_000_000, 12_000_000
"""Largest page without and with a model inside."""
TOP, DIVIDED, COLUMNS = 5, 4, 256
"""Number of predictions per layer and position; of logits per position that are divided into terms;
of features in the image of position vectors."""
ADDED = ("attention_branch", "feed_forward_branch")

Progress = Callable[[int, int | None], object]


def attentions(decoder: Decoder) -> list[SelfAttention]:
    """The attention of each layer."""
    return [cast(Block, layer).attention for layer in decoder.layers]


def token_limit(decoder: Decoder) -> int:
    """Largest number of tokens of a prompt for which the page surely keeps its size limit."""
    layers, vocab = len(decoder.layers) + 1, decoder.config.vocab_size
    heads = sum(attention.n_heads for attention in attentions(decoder))

    def needed(tokens: int) -> float:
        binary = heads * tokens * (tokens + 1) / 2 + (heads + layers) * tokens * 4 * DIVIDED
        # The template, and the ablations and kinds of the heads.
        text = 100_000 + 150 * (heads + 3 * layers) + 160 * layers * tokens
        return 4 / 3 * (binary + 2 * vocab) + text

    most = min(MOST_TOKENS, decoder.config.steady_length())  # so RoPE's angles do not depend on it
    return next((n for n in range(most, 1, -1) if needed(n) < 0.97 * PAGE_BYTES), 1)


def page_data(
    model: Model,
    prompt: str | Sequence[int],
    *,
    chat: bool = False,
    ablations: bool = True,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Everything that the page shows, as plain data. Arrays have `dtype`, `shape` and `base64`.

    Args:
        model: the model; its reference is run.
        prompt: a string, or token ids.
        chat: True if the prompt is a message of a user, to be formatted as in a chat.
        ablations: False to skip the passes without a part of the model. A model that is in the page
            needs none.
        progress: called with the number of layers whose parts were ablated, and of all layers.

    Raises:
        WorkhorseError: the prompt is empty or too long, or has ids that the model does not have.
    """
    before, ids, after = _encoded(model, prompt, chat)
    decoder, limit = model.reference, token_limit(model.reference)
    if not 1 <= len(ids) <= limit:
        fact = f"the prompt has {len(ids)} tokens, and the page of this model explains 1 to {limit}"
        raise WorkhorseError(f"{fact}; give {'a shorter' if ids else 'another'} prompt")
    added = [f"layers.*.{name}" for name in ADDED]
    run = Tracer(decoder)(ids, keep=[*streams(decoder), WEIGHTS, *added])
    if not bool(run.logits.isfinite().all()):
        raise WorkhorseError("the model's logits are not finite for this prompt; use float32")
    reason, last = why_not_live(model), run.logits[0, -1].float()
    found = logit_lens(decoder, run, TOP)
    lens = {"ids": found.ids[:, 0].tolist(), "p": _rounded(found.logprobs[:, 0].exp())}
    terms = _terms(decoder, ids, lens["ids"][-1])
    removed = _ablations(decoder, run, progress) if reason and ablations else None
    vocab: Iterable[int] = range(decoder.config.vocab_size)
    if reason:
        tops = [*lens["ids"], *(removed["ids"] if removed else ()), terms["targets"]]
        likely = last.topk(min(60, len(last))).indices.tolist()
        vocab = {*ids, *likely, *(token for rows in tops for row in rows for token in row)}
    logprobs = log_probabilities(run.logits[0, :-1].float())
    scores = head_scores(decoder)
    own = logprobs.gather(1, torch.tensor(ids[1:], device=last.device, dtype=torch.int64)[:, None])
    return {
        "name": model.name,
        "trained": model.trained,
        "parameters": count_parameters(decoder.config)["total"],
        "dtype": str(next(decoder.parameters()).dtype).removeprefix("torch."),
        "config": decoder.config.to_dict(),
        "layers": decoder.config.layer_names(),
        "prompt": prompt if isinstance(prompt, str) else None,
        "ids": ids,
        "pieces": _pieces(model, vocab),
        "special": [] if model.tokenizer is None else [*model.tokenizer.special_tokens.values()],
        "lens": lens,
        "scores": {
            "rank": ((logprobs > own).sum(1) + 1).tolist(),
            "logprob": [round(value, 6) for value in own[:, 0].tolist()],
        },
        "logits": _array((last - last.max()).half() if reason else last),
        "attention": [_array(_triangle(weights[0])) for weights in attention_patterns(run)],
        "norms": {"stream": _rounded(stream_norms(decoder, run)[:, 0])}
        | {name: _rounded(_norms(run, name)) for name in ADDED},
        "attribution": terms,
        "positions": positions(decoder, len(ids) if reason else limit),
        "cost": cost(decoder),
        "labels": head_labels(scores),
        "kinds": {kind: _rounded(each.nan_to_num(0)) for kind, each in scores.items()},
        "ablations": removed,
        "live": {"reason": reason} if reason else _live(model, before, after),
    }


def write_page(path: Path, data: Mapping[str, Any]) -> int:
    """Write the page to a file, and return its size in bytes.

    Raises:
        WorkhorseError: the page is too large, or cannot be written.
    """
    html, policy = TEMPLATE.read_text(encoding="utf-8"), "default-src 'none'; img-src data:"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        policy += f"; {tag}-src 'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        fact = "the page cannot show this pass: some of its numbers are not finite"
        raise WorkhorseError(f"{fact}; use --dtype float32, or --no-ablations") from None
    text = text.replace("<", "\\u003c")
    title = escape(f"Inside {Path(data['name']).name}")
    # From the last place to the first, so that no value is read as a place.
    for name, value in (("data", text), ("title", title), ("policy", policy)):
        html = html.replace(f"[[{name}]]", value, 1)
    page = html.encode("utf-8", "replace")
    most = PAGE_BYTES if "reason" in data["live"] else LIVE_PAGE_BYTES
    if len(page) > most:
        raise WorkhorseError(
            f"the page has {len(page):,} bytes, above {most:,}; shorten the prompt"
        )
    write_atomically(path, page)
    return len(page)


def _array(tensor: Tensor) -> dict[str, Any]:
    flat = tensor.detach().cpu().contiguous()
    content = bytes(flat.flatten().view(torch.uint8).numpy())
    dtype = str(flat.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": [*flat.shape], "base64": b64encode(content).decode()}


def _rounded(values: Tensor) -> Any:
    """Nested lists of numbers with four digits."""
    return [*map(_rounded, values)] if values.ndim else float(f"{values.item():.4g}")


def _norms(run: Trace, name: str) -> Tensor:
    layers = range(len(attention_patterns(run)))
    return torch.stack([run[f"layers.{n}.{name}"][0].float().norm(dim=-1) for n in layers])


def _pieces(model: Model, ids: Iterable[int]) -> dict[int, str | list[int]]:
    """The text of tokens; a list of bytes for tokens that are not UTF-8 by themselves."""
    tokenizer, found = model.tokenizer, dict[int, str | list[int]]()
    for token in ids:
        if tokenizer is not None and (data := tokenizer.display_bytes(token)) is not None:
            text = data.decode("utf-8", "replace")
            found[token] = text if text.encode() == data else [*data]
    return found


def _triangle(weights: Tensor) -> Tensor:
    """Attention weights (heads, seq, seq) in 8 bits; without later keys, if all weights are 0."""
    codes = (weights.float() * 255).round().to(torch.uint8)
    rows, columns = torch.tril_indices(*codes.shape[1:])
    return codes if bool(codes.triu(1).any()) else codes[:, rows, columns]


def _terms(decoder: Decoder, ids: list[int], tops: list[list[int]]) -> dict[str, Any]:
    """The terms of the largest logits at every position, and of the next token's logit.

    The path from the parts to a logit does not cross positions. So one backward pass from a sum
    divides one logit of every position.
    """
    linear = LinearTracer(decoder, leaves_of(decoder, "heads"))
    run, token = linear.run(ids), "embedding.positions.x"
    following = [*([one] for one in ids[1:]), []]
    targets = [
        [*dict.fromkeys((*top[: DIVIDED - 1], *one))]
        for top, one in zip(tops, following, strict=True)
    ]
    biases: dict[str, Tensor] = {}
    for name, value in linear.biases().items():
        module = name.removesuffix(".bias")
        if module in run and run[module].requires_grad:
            biases[module] = value.detach()
    paths = list(dict.fromkeys((*linear.leaves, *biases)))
    found: list[Tensor] = []
    for slot in range(DIVIDED):
        chosen = torch.tensor([one[min(slot, len(one) - 1)] for one in targets])[:, None]
        logit = run.logits[0].gather(1, chosen.to(run.logits.device)).sum()
        tensors = [run[path] for path in paths]
        grads = torch.autograd.grad(logit, tensors, retain_graph=True, allow_unused=True)
        used = zip(paths, grads, strict=True)
        gradient = {path: grad for path, grad in used if grad is not None}
        along = gradient["embedding"][0]
        terms = [(along * x).sum(-1) for x in (run[token][0], (run["embedding"] - run[token])[0])]
        for leaf in linear.leaves[1:]:
            terms += (gradient[leaf] * run[leaf]).sum(-1).reshape(-1, len(ids))
        on_path = [(gradient[n] @ bias)[0] for n, bias in biases.items() if n in gradient]
        terms.append(torch.stack([torch.zeros_like(terms[0]), *on_path]).sum(0))
        found.append(torch.stack(terms, dim=1).detach().float())
    return {"targets": targets, "terms": _array(torch.stack(found))}


class _Ablator(Tracer):
    @torch.no_grad()
    def from_layer(self, layer: int, x: Tensor, edits: Mapping[str, Any]) -> Tensor:
        """Logits of the last position, from the residual stream before a layer."""
        self._edits, self._keep, self._seen = self._resolved(edits), (), {}
        most = self.decoder.max_positions
        context = Context(x.shape[0], x.shape[1], x.device, max_positions=most)
        for block in [*self.decoder.layers][layer:]:
            x = block(x, context, None)
        return self.decoder.unembed(self.decoder.final_norm(x[:, -1:]))[:, 0]


def _ablations(decoder: Decoder, run: Trace, progress: Progress) -> dict[str, Any]:
    """The last prediction when a part's output is zero.

    Each layer has a row per head, and one for the attention, the feed-forward and both. `kl` is the
    divergence from the prediction of the whole model, in nats.
    """
    ablator, own = _Ablator(decoder), log_probabilities(run.logits[0, -1].float())
    found: dict[str, Any] = {"kl": [], "ids": [], "p": []}

    def zero(rows: Any) -> Callable[[Tensor], Tensor]:
        return lambda y: y.index_put(rows, y.new_zeros(()))

    for number, attention in enumerate(attentions(decoder)):
        heads, name, x = attention.n_heads, f"layers.{number}", run[streams(decoder)[number]]
        each, both = torch.arange(heads), torch.tensor([0, 2]) + heads
        edits = {
            f"{name}.attention.kernel": zero((each, each)),
            f"{name}.{ADDED[0]}": zero((both,)),
            f"{name}.{ADDED[1]}": zero((both.clamp(min=heads + 1),)),
        }
        logits = ablator.from_layer(number, x.expand(heads + 3, -1, -1), edits)
        logprobs = log_probabilities(logits.float())
        best = logprobs.exp().topk(min(TOP, logprobs.shape[-1]))
        kl = (own.exp() * (own - logprobs)).sum(-1).clamp(min=0)
        found["kl"].append(_rounded(kl))
        found["ids"].append(best.indices.tolist())
        found["p"].append(_rounded(best.values))
        progress(number + 1, len(decoder.layers))
    return found


def positions(decoder: Decoder, seq: int) -> dict[str, Any]:
    """Position encodings by block name, and the vectors added to the embedding."""
    blocks: dict[str, Any] = {}
    config = decoder.config
    for name, built in zip(config.layer_names(), attentions(decoder), strict=True):
        block, pattern = config.blocks[name], built.pattern
        found = {key: getattr(pattern, key) for key in ("causal", "window", "chunk")}
        if block.rope:
            latent = cast(Any, block.attention)
            width = block.grouped.key_dim(config.d_model) if block.grouped else latent.rope_dim
            found |= _rotation(block.rope, width, seq)
        if pattern.alibi_slopes:
            scaled = cast(Any, block.attention).position.scaled
            found |= {"slopes": pattern.alibi_slopes, "scaled": scaled}
        blocks[name] = {"kind": block.attention.position.kind, **found}
    return {"blocks": blocks, "added": _added(decoder, seq)}


def _rotation(rope: RopeConfig, width: int, seq: int) -> dict[str, Any]:
    turned, where, scaling = rope.rotary_dim(width), torch.device("cpu"), rope.scaling
    plain = inverse_powers(rope.theta, turned, where)
    scaled = scaling.frequencies(rope.theta, turned, seq, where) if scaling else plain
    return {
        "frequencies": scaled.tolist(),
        "unscaled": plain.tolist(),
        "amplitude": scaling.amplitude if scaling else 1.0,
        "scaling": scaling.kind if scaling else None,
        "width": width,
        **{key: getattr(rope, key) for key in ("theta", "pairing", "reverse")},
    }


@torch.no_grad()
def _added(decoder: Decoder, seq: int) -> dict[str, Any]:
    kind, module = decoder.config.embedding.position.kind, decoder.embedding.positions
    if kind == "none":
        return {"kind": kind}
    at, width = torch.arange(seq, device=decoder.device)[None], decoder.config.d_model
    image = module(torch.zeros(1, seq, width, device=decoder.device), at)[0, :, :COLUMNS].float()
    largest = float(image.abs().max()) or 1.0
    codes = _array((image / largest * 127).round().to(torch.int8))
    return {"kind": kind, "largest": largest, "of": width, "image": codes}


def cost(decoder: Decoder) -> dict[str, Any]:
    """Operations and bytes of a forward pass, for any number of tokens.

    `per_token` counts the matmuls with weights. `scores` has the operations per query and key of
    each layer, and `cache` its bytes per token, each with the largest number of keys or None.
    """
    weights: dict[str, int] = {}
    components, seen = components_of(decoder), set[int]()
    for name, tensor in tensors_of(decoder).items():
        new = 0 if tensor.data_ptr() in seen else tensor.nbytes
        weights[components[name]] = weights.get(components[name], 0) + new
        seen.add(tensor.data_ptr())
    dtype, parts = next(decoder.parameters()).dtype, attentions(decoder)
    each = forward_flops(decoder, seq_len=1)
    causal = all(part.pattern.causal for part in parts)
    return {
        "per_token": {name: flops for name, flops in each.items() if name != SCORES},
        "scores": [
            (2 * part.n_heads * (part.head_dim + part.value_dim), part.pattern.reach)
            for part in parts
        ],
        "weights": weights,
        "cache": [*map(tuple, cache_of_layers(decoder.config, dtype))] if causal else None,
        "itemsize": dtype.itemsize,
    }


def why_not_live(model: Model) -> str:
    """The reason why the page cannot run a model itself; empty if it can."""
    decoder = model.reference
    config, total = decoder.config, count_parameters(decoder.config)["total"]
    if total > LIVE_PARAMETERS:
        return f"it has {total:,} parameters, and a page holds up to {LIVE_PARAMETERS:,}"
    definition = "" if model.tokenizer is None else model.tokenizer.definition
    size = 4 / 3 * sum(weight.nbytes for weight in decoder.parameters()) + len(definition)
    if size > 0.93 * LIVE_PAGE_BYTES:
        return f"its weights and its tokenizer do not fit into {LIVE_PAGE_BYTES:,} bytes"
    if applied := [one.name for one in transforms_of(decoder)]:
        return f"its weights are changed ({', '.join(applied)})"
    if not all(bool(weight.isfinite().all()) for weight in decoder.parameters()):
        return "some of its weights are not finite"
    (known,) = re.findall('id="computes">(.*?)</script>', TEMPLATE.read_text("utf-8"), re.DOTALL)
    unknown = dict.fromkeys(_not_computed("model", config, json.loads(known)))  # each once
    return f"the page does not compute {', '.join(unknown)}" if unknown else ""


def _not_computed(name: str, value: Any, computed: Mapping[str, str]) -> Iterator[str]:
    """The settings inside a value of a config that the page's script does not compute.

    `computed` has the fields that it computes, by config class: `field`, or `field=value|value`.
    """
    if isinstance(value, dict):
        for one in cast(dict[str, Any], value).values():
            yield from _not_computed(name, one, computed)
    elif isinstance(value, Config):
        known = computed.get(type(value).__name__)
        if known is None:
            yield f"{name}={getattr(value, 'kind', '...')}"
            return
        fields = {word.partition("=")[0]: word.partition("=")[2] for word in known.split()}
        for inner, info in type(value).model_fields.items():
            one, values = getattr(value, inner), fields.get(inner)
            new = values is None and one != info.default
            if new or (values and str(one) not in values.split("|")):
                yield f"{inner}={'...' if isinstance(one, Config) else one}"
            else:
                yield from _not_computed(inner, one, computed)


def _encoded(
    model: Model, prompt: str | Sequence[int], chat: bool
) -> tuple[list[int], list[int], list[int]]:
    """The ids before the prompt's own text, all ids, and the ids after the text."""
    if not isinstance(prompt, str):
        return [], [*prompt], []
    if not chat:
        return [*model.prefix], model.encode(prompt), []
    ids = model.chat_format().encode([{"role": "user", "content": prompt}])
    text = model.text.encode(prompt)
    ends = range(len(text), len(ids) + 1)
    end = next((end for end in ends if ids[end - len(text) : end] == text), 0)
    return ids[: max(end - len(text), 0)], ids, ids[end:]


def _live(model: Model, before: list[int], after: list[int]) -> dict[str, Any]:
    """The weights and the tokenizer for the page's own forward pass."""
    decoder, names, weights = model.reference, dict[int, str](), dict[str, Any]()
    for name, tensor in tensors_of(decoder).items():
        first = names.setdefault(tensor.data_ptr(), name)
        stored = tensor if tensor.dtype == torch.bfloat16 else tensor.float()
        weights[name] = _array(stored) if first == name else first
    definition = None if model.tokenizer is None else json.loads(model.tokenizer.definition)
    return {
        "weights": weights,
        "scales": [attention.kernel.scoring.scale for attention in attentions(decoder)],
        "limit": token_limit(decoder),
        "tokenizer": definition,
        "before": before,
        "after": after,
        "start": definition and model.start,
        "guarded": [name for name in reachable(definition) if len(name) > 1] if definition else [],
    }
