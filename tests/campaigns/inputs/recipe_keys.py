"""Every key of a recipe with unexpected values, and invalid recipes."""

from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_origin

from tests.campaigns.inputs.attempt import Attempt, turned
from tests.campaigns.inputs.workplace import RECIPE, SOUND
from workhorse.config.base import Config
from workhorse.nn import DecoderConfig
from workhorse.train import Recipe

VALUES = (
    *("", "null", "[]", "{}", "[[]]", "{a: 1}", "word", "'0'", "true", "-1", "0", "1e-40", "3.5"),
    *("1e39", "1e308", ".inf", "-.inf", ".nan", "99999999999", "1" + "0" * 30, "9" * 5000),
    *("[1, a, {}]", "{kind: word}", "{kind: [1]}", "'\U0001f600\u202e'", "2020-01-01"),
)
"""Values for every key, parsed as YAML."""

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGED = RECIPE.replace("train:\n", "common: &common {steps: 2}\ntrain:\n  <<: *common\n")
RECIPES = {
    "empty": "",
    "a word": "recipe",
    "a number": "1",
    "a list": "- 1\n- 2\n",
    "null": "null",
    "aliases that grow exponentially": ALIASES + "\n" + RECIPE,
    "aliases that grow exponentially, as the name": RECIPE.replace(
        "name: tiny", ALIASES + "\nname: *i"
    ),
    "aliases of mappings that grow exponentially": "a: &a {k: 1}\n"
    + "\n".join(
        f"{name}: &{name} {{{', '.join(f'k{i}: *{before}' for i in range(9))}}}"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "one alias": RECIPE.replace("validation: texts", "validation: *it").replace(
        "path: texts", "path: &it texts"
    ),
    "a list that refers to itself": RECIPE + "loop: &loop [*loop]\n",
    "a mapping that refers to itself": RECIPE + "loop: &loop {in: *loop}\n",
    "the whole document refers to itself": "&all\nname: *all\n",
    "an undefined alias": RECIPE + "loop: *nothing\n",
    "lists nested": RECIPE + "deep: " + "[" * 5000 + "]" * 5000,
    "mappings nested": RECIPE + "deep: " + "{a: " * 5000 + "1" + "}" * 5000,
    "blocks nested": "".join(f"{' ' * n}a:\n" for n in range(3000)),
    "lists nested, never closed": "[" * 100_000,
    "a merge": MERGED,
    "a merge of a list": RECIPE.replace("train:\n", "train:\n  <<: [1, 2]\n"),
    "a merge of itself": "a: &a\n  <<: *a\n",
    "merges that grow exponentially": "a0: &a0 {k: 1}\n"
    + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)),
    "a date": RECIPE + "when: 2020-01-01\n",
    "a date by its tag": RECIPE + "when: !!timestamp 2020-01-01\n",
    "a set": RECIPE + "set: !!set {a, b}\n",
    "binary": RECIPE + "binary: !!binary aGVsbG8=\n",
    "binary as the name": RECIPE.replace("name: tiny", "name: !!binary aGVsbG8="),
    "binary in the model": RECIPE.replace("d_model: 16", "d_model: !!binary aGVsbG8="),
    "a date in the model": RECIPE.replace("d_model: 16", "d_model: !!timestamp 2020-01-01"),
    "a set in the model": RECIPE.replace("d_model: 16", "d_model: !!set {a}"),
    "an ordered mapping": RECIPE + "pairs: !!omap [a: 1]\n",
    "pairs": RECIPE + "pairs: !!pairs [a: 1]\n",
    "a Python object": RECIPE + "it: !!python/object/apply:os.system [id]\n",
    "a Python name": RECIPE + "it: !!python/name:os.system\n",
    "a number of 5,000 digits": RECIPE.replace("steps: 2", f"steps: {'9' * 5000}"),
    "a key of 5,000 digits": RECIPE + f"{'9' * 5000}: 1\n",
    "a float of 5,000 digits": RECIPE.replace("steps: 2", f"steps: {'9' * 5000}.5"),
    "an int by its tag": RECIPE.replace("steps: 2", "steps: !!int x"),
    "an int by its tag, to base 60": RECIPE.replace("steps: 2", "steps: !!int 1:2"),
    "a float by its tag": RECIPE.replace("steps: 2", "steps: !!float x"),
    "a bool by its tag": RECIPE.replace("steps: 2", "steps: !!bool x"),
    "invalid binary": RECIPE.replace("steps: 2", "steps: !!binary é"),
    "an invalid date": RECIPE.replace("steps: 2", "steps: !!timestamp 2020-99-99"),
    "a mapping by its tag": RECIPE.replace("steps: 2", "steps: !!map x"),
    "a key given twice": RECIPE + "name: again\n",
    "a list as a key": RECIPE + "? [1]\n: 2\n",
    "a mapping as a key": RECIPE + "? {a: 1}\n: 2\n",
    "no key": RECIPE + ": 2\n",
    "a number as a key": RECIPE + "3: 2\n",
    "two documents": RECIPE + "---\n" + RECIPE,
    "tabs": RECIPE.replace("  steps", "\tsteps"),
    "NUL": RECIPE + "a: \0\n",
    "NUL quoted": RECIPE.replace("name: tiny", 'name: "a\\0b"'),
    "NUL in a path": RECIPE.replace("path: texts", 'path: "a\\0b"'),
    "a lone surrogate": RECIPE.replace("name: tiny", r'name: "\ud800"'),
    "a lone surrogate in a path": RECIPE.replace("path: texts", r'path: "\ud800"'),
    "a bell as the name": RECIPE.replace("name: tiny", r'name: "\a\e[31m"'),
    "a name of 300 letters": RECIPE.replace("name: tiny", "name: " + "n" * 300),
    "never closed": RECIPE + 'x: "',
    "a YAML directive": "%YAML 9.9\n---\n" + RECIPE,
    "a long line": RECIPE + "x: " + "y" * 1_000_000 + "\n",
    "many keys": RECIPE + "".join(f"k{n}: 1\n" for n in range(20_000)),
    "many keys in the model": RECIPE.replace(
        "  d_model: 16\n", "  d_model: 16\n" + "".join(f"  k{n}: 1\n" for n in range(5_000))
    ),
    "sound": RECIPE,
}
OVERRIDES = (
    *("data.corpus.glob=**/*", "data.corpus.glob='**/*'", "data.corpus.path=-", "name=-"),
    *("data.corpus.path=[", "train.steps: 3", "train.steps", "=3", "=", ".=1", "..=", "a.=1"),
    *(".a=1", "train..steps=3", "train.steps.more=3", "name.first=x", "train.steps=3=4"),
    *("train={}", "train=[]", "train=null", "train=3", "model=null", "model=[]", "data=null"),
    *("train.steps=" + "[" * 3000, "train.steps=*a", "train.steps=&a 3", "train.steps=!!set {a}"),
    *(
        "train.steps=&a [*a]",
        "a." * 2000 + "b=1",
        "x" * 100_000 + "=1",
        "train.steps=\0",
        "name=\t",
    ),
    *("data.corpus=stdin", "data.corpus=stdlib/", "data.corpus=-", "data.corpus=text"),
    *(
        "model.blocks.main.attention.position=rope",
        "train.optimizer=adamw",
        "train.schedule=cosine",
    ),
    *("train.optimizer.kind=muon", "train.optimizer.kind=adamw", "train.schedule.kind=cosine"),
    *("tokenizer=bytes", "tokenizer=bpe", "tokenizer=gpt2", "init=run", "init=gpt2", "init=folder"),
    *(
        "init=",
        "init=pipe",
        "init=a/b",
        "model.preset=gpt2",
        "model.preset=gpt9",
        "model.preset=[]",
    ),
    *("train.warmup_steps=3", "train.trackers=[tensorboard]", "train.trackers=[tensorboard, x]"),
    *(
        "data.corpus.path=pipe",
        "data.corpus.path=folder",
        "data.corpus.path=/",
        "data.corpus.path=",
    ),
    *("data.cache_dir=pipe", "data.cache_dir=text.txt", "data.cache_dir=/proc/x", "name=../x"),
    *("name=/x", "name=.", "name=..", "name=a\\b", "name=con", "name=null", "name=1"),
    *("<<=1", "<<={steps: 3}", "train.<<={steps: 3}", "train.samples.prompts=[" + "x," * 999 + "]"),
    "train.samples.prompts=[" + "longer than the context" * 9 + "]",
    *("{kind: text, path: " + path for path in ("/dev/zero}", "pipe}", "binary}", "empty}", "-}")),
    *("data.corpus={kind: text, path: " + path + "}" for path in ("/dev/zero", "pipe", "binary")),
    *("data.corpus={kind: text, path: " + path + "}" for path in ("empty", "'-'", "folder", "x")),
    *("data.corpus={kind: jsonl, path: " + path + "}" for path in ("lines.jsonl", "pipe", "empty")),
    *("data.corpus={kind: jsonl, path: " + path + "}" for path in ("binary", "text.txt", "folder")),
    *("data.corpus={kind: parquet, path: " + path + "}" for path in ("binary", "empty", "pipe")),
    *("tokenizer={kind: file, path: " + path + "}" for path in ("bpe", "pipe", "folder", "binary")),
)


ENDLESS = ("train.steps=99999999999", "train.minutes=3.5")
"""Valid settings that take minutes or forever."""
OF_EACH = 3
"""Number of values that each key gets."""


def attempts(turn: int = 0) -> Iterator[Attempt]:
    for number, (path, arm) in enumerate(keys()):
        values = [value for value in VALUES if f"{path}={value}" not in ENDLESS]
        for value in turned(values, OF_EACH, turn + number):
            shown = value if len(value) < 40 else f"{value[:4]}*{len(value)}"
            yield _train(f"keys/{path} {arm}={shown!r}", *_kind(path, arm), f"{path}={value}")
    for number, setting in enumerate(OVERRIDES):
        yield _train(f"overrides/{number} {setting[:60]!r}", setting)
    for name, text in RECIPES.items():
        for verb in (["train"], ["data", "prepare"], ["train", "--dry-run"]):
            where = [] if "--dry-run" in verb else ["--out", "out"]
            yield Attempt(
                f"recipes/{' '.join(verb)}/{name}",
                [*verb, "recipe.yaml", *where],
                changes={"recipe.yaml": ["hex", text.encode("utf-8", "surrogatepass").hex()]},
            )


def _train(name: str, *settings: str) -> Attempt:
    line = ["train", "recipe.yaml", "--out", "out", "--", *settings]
    words = [word.replace("\0", "\a") for word in line]
    kept = [setting.partition("=")[2].strip("'") for setting in settings if "cache_dir" in setting]
    writes = ("out", "home/.cache", *(name for name in kept if name and name not in SOUND))
    return Attempt(name, words, "some text\n" * 30, writes=writes)


def _kind(path: str, arm: str) -> list[str]:
    """Settings that select the alternative of a union with the tested key."""
    return [f"{path.rpartition('.')[0]}={{kind: {arm}}}"] if arm else []


def keys() -> list[tuple[str, str]]:
    """Every dotted key of a recipe, and the kind that its mapping must have."""
    found = dict.fromkeys(_keys(Recipe, ""))
    return list(found | dict.fromkeys(_keys(DecoderConfig, "model.")))


def _keys(
    config: type[Config], prefix: str, arm: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    for name, field in config.model_fields.items():
        path = f"{prefix}{name}"
        yield path, "" if name == "kind" else arm
        if depth > 6:
            continue
        in_mapping = _in_mapping(field.annotation)
        for inner in _configs(field.annotation):
            kind = inner.model_fields.get("kind")
            yield from _keys(
                inner,
                f"{path}.main." if in_mapping else f"{path}.",
                str(kind.default) if kind else "",
                depth + 1,
            )


def _in_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def _configs(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    inner = [
        kind for part in get_args(annotation) if part is not NoneType for kind in _configs(part)
    ]
    return list(dict.fromkeys(inner))
