"""Rules by which byte-level BPE splits a text into words before merging.

llama.cpp has these rules built in, and names them after models. A tokenizer's rule is found by its
regular expressions, not by the tokenizer's name.
"""

from collections.abc import Iterator
from typing import Any

from workhorse.errors import WorkhorseError, nearest

Data = dict[str, Any]
Rule = tuple[str, ...]
"""Regular expressions that are applied one after another to split a text."""

GPT2_RULE = "gpt-2"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SAME_CONTRACTIONS = r"'(?i:[sdmt]|ll|ve|re)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

GPT2 = "<GPT-2's rule of ByteLevel>"
DIGITS = "<each digit by itself>"
LLAMA3 = CONTRACTIONS + WORD + r"\p{N}{1,3}" + PUNCTUATION + TAIL
QWEN2 = CONTRACTIONS + WORD + r"\p{N}" + PUNCTUATION + TAIL
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + TAIL
)
WORKHORSE = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,N}" + PUNCTUATION + TAIL


def _cased(end: str) -> str:
    """A pattern for words that also end before a capital letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{UPPER}*{LOWER}+{end}|{start}{UPPER}+{LOWER}*{end}|"


CASED_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
GPT4O = _cased(CONTRACTIONS + "?") + r"\p{N}{1,3}" + CASED_PUNCTUATION + TAIL
TEKKEN = _cased("") + r"\p{N}" + CASED_PUNCTUATION + TAIL
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + TAIL,
)
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", WORDS, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]")
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

DEFAULT_RULE = "default"
"""llama.cpp's rule for a file that does not name one."""
RULES: dict[tuple[Rule, bool], str] = {
    ((GPT2,), False): GPT2_RULE,
    ((DIGITS, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    (DEEPSEEK3, False): "deepseek-v3",
    (FALCON, False): "falcon",
    ((BLOOM,), False): "bloom",
    ((BLOOM, r"\p{N}"), False): "viking",
    (DEFAULT, False): DEFAULT_RULE,
}
"""llama.cpp's name of each rule, by its expressions and `ignore_merges` (see `pre_tokenizer`)."""

MARKS = "llama.cpp splits words at combining marks where this tokenizer does not: {}"
SCRIPTS = "Indic scripts and decomposed accents get different tokens"
NEAR: dict[tuple[Rule, bool], tuple[str, str]] = {
    ((WORKHORSE.replace("{1,N}", "{1,1}"),), False): (
        "qwen35",
        MARKS.format("only after two or more punctuation characters"),
    ),
    ((WORKHORSE.replace("{1,N}", "{1,3}"),), False): (
        "smaug-bpe",
        MARKS.format(SCRIPTS),
    ),
    ((GPT4O,), False): ("gpt-4o", MARKS.format(SCRIPTS)),
    ((TEKKEN,), True): ("tekken", MARKS.format(SCRIPTS)),
}
"""Rules that llama.cpp does not have, each with its nearest rule and a warning for the user."""

SAME = {
    GPT2_RULE: "phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "exaone4 mpt olmo jais trillion granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "smaug-bpe": "dbrx glm4 chatglm-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "bloom": "poro-chat gpt3-finnish",
}
"""Other names for the same rule in llama.cpp (`src/llama-vocab.cpp`)."""
BEGINNING = ("llama-bpe", "tekken")
"""Rules for which llama.cpp adds bos before the input, if the file does not set `add_bos_token`."""

OWN = {key: NEAR[key] for key in (((GPT4O,), False), ((TEKKEN,), True))}
"""Rules that llama.cpp has under the rule's own name, but does not implement exactly."""


def splitting_rule(definition: Data) -> tuple[str, list[str]]:
    """Return llama.cpp's name for the splitting rule of a `tokenizer.json`, and warnings.

    Raises:
        WorkhorseError: llama.cpp has no such rule.
    """
    remarks: list[str] = []
    match definition["normalizer"]:
        case None:
            pass
        case {"type": "NFC"}:
            remarks.append("llama.cpp does not normalise text to NFC; normalise it beforehand")
        case other:
            raise WorkhorseError(
                f"llama.cpp does not support the normalizer {other['type']} in byte-level "
                "tokenizers; write the model without the tokenizer (--no-tokenizer)"
            )
    if not definition["model"]["merges"]:
        return GPT2_RULE, remarks  # nothing is merged, so every rule gives the same tokens
    key = tuple(_steps(definition["pre_tokenizer"])), bool(definition["model"]["ignore_merges"])
    if key in RULES:
        return RULES[key], remarks
    if key in NEAR:
        name, remark = NEAR[key]
        return name, [*remarks, remark]
    raise WorkhorseError(
        f"llama.cpp has no rule that splits words like this tokenizer ({' then '.join(key[0])}); "
        "write the model without the tokenizer (--no-tokenizer)"
    )


def canonical_rule(name: str) -> str:
    """Return the main name of a rule, as in `RULES` or `OWN`, for any of its llama.cpp names.

    Raises:
        WorkhorseError: the rule is unknown.
    """
    others = {one: rule for rule, names in SAME.items() for one in names.split()}
    name = others.get(name, name)
    known = [*RULES.values(), *(near for near, _ in OWN.values())]
    if name not in known:
        raise WorkhorseError(
            f"llama.cpp's rule {name[:60]!r} for splitting words is unknown; "
            f"{nearest(name[:60], [*known, *others])}"
        )
    return name


def pre_tokenizer(name: str) -> tuple[Data, bool]:
    """Return the pre-tokenizer of a splitting rule for `tokenizer.json`, and `ignore_merges`.

    If `ignore_merges` is True, a word in the vocabulary becomes one token without any merges.

    Args:
        name: a name from `canonical_rule`.
    """
    names = {name: key for key, name in RULES.items()} | {
        near: key for key, (near, _) in OWN.items()
    }
    steps, ignore_merges = names[name]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre_tokenizers: list[Data] = []
    for step in steps:
        if step == DIGITS:
            pre_tokenizers.append({"type": "Digits", "individual_digits": True})
        elif step != GPT2:
            pattern = {"Regex": step}
            pre_tokenizers.append(
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            )
    pre_tokenizers.append(as_bytes | {"use_regex": GPT2 in steps})
    return {"type": "Sequence", "pretokenizers": pre_tokenizers}, ignore_merges


def _steps(step: Data | None) -> Iterator[str]:
    """Yield the steps of a pre-tokenizer in order, each as a regular expression as in `RULES`."""
    match step:
        case None | {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False}:
            return
        case {"type": "Sequence", "pretokenizers": steps}:
            for one in steps:
                yield from _steps(one)
        case {"type": "ByteLevel", "add_prefix_space": False}:
            yield GPT2
        case {"type": "Digits", "individual_digits": True}:
            yield DIGITS
        case {
            "type": "Split",
            "pattern": {"Regex": rule},
            "behavior": "Isolated",
            "invert": False,
        } | {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Removed", "invert": True}:
            rule = rule.replace("\r", r"\r").replace("\n", r"\n")
            yield rule.replace(SAME_CONTRACTIONS, CONTRACTIONS)
        case _:
            yield f"<{step.get('type')}>"
