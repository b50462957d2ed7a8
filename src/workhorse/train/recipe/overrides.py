"""Command-line overrides of a recipe, and messages for misplaced keys."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import yaml

from workhorse.config.base import Config, ConfigError, OfItsKind, parse_yaml
from workhorse.config.overrides import apply_overrides
from workhorse.parallel.config import ParallelismConfig
from workhorse.train.recipe.recipe import preset_with
from workhorse.train.recipe.reference import (
    NAME,
    all_keys,
    configs_at,
    examples,
    names_at,
    synonyms,
)

LISTED = 3
"""Maximum number of dotted keys that an error lists."""


def with_its_place(error: ConfigError, fields: Any) -> ConfigError:
    """Improve an error about an unknown or missing key: name the right dotted key, or an example.

    The error is returned unchanged if there is nothing to add.
    """
    if error.missing_key:
        return _with_an_example(error, fields)
    key, place = error.unknown_key, error.path
    if not key:
        return error
    section = _section_at(place, fields)
    own = section.get("kind") if isinstance(section, Mapping) else None
    meant = synonyms().get(f"{own}.{key}", [])
    kinds = [kind for kind, config in configs_at(place).items() if key in config.model_fields]
    if kinds and not meant:
        reason = f"unknown key {key!r}, which belongs to kind: {' or '.join(sorted(kinds))}"
        return ConfigError(f"{reason}; choose that kind, or remove {key}", place)
    places = [
        full
        for name in meant or synonyms().get(key, ())
        for full in _places_of_synonym(name, fields)
    ]
    places = places or places_of(key, fields)
    if "did you mean" not in error.reason:
        places = places or [full for name in _near(key) for full in places_of(name, fields)]
    inside = [full for full in places if place and full.startswith(f"{place}.")]
    if not places:
        return error
    return ConfigError(f"unknown key {key!r}; did you mean {listed(inside or places)}?", place)


def _with_an_example(error: ConfigError, fields: Any) -> ConfigError:
    """Add an example from the reference to an error about a missing key."""
    key, place = error.missing_key, error.path
    section = _section_at(place, fields)
    kind = section.get("kind") if isinstance(section, Mapping) else None
    configs = configs_at(place)
    possible = [configs[kind]] if kind in configs else list(configs.values())
    for text in (text for config in possible for text in examples().get(config.__name__, ())):
        if key in (example := parse_yaml(text)):
            written = yaml.safe_dump({key: example[key]}, default_flow_style=True, sort_keys=False)
            where = f"{place}.{key}".lstrip(".")
            return ConfigError(
                f"{key!r} is missing; set one such as {' '.join(written.split())[1:-1]} "
                f"(see workhorse recipe {where})",
                place,
            )
    return error


def _section_at(place: str, fields: Any) -> Any:
    """Return the value of a dotted key of a recipe; None if the recipe does not have the key."""
    for part in place.split(".") if place else ():
        fields = fields.get(part) if isinstance(fields, Mapping) else None
    return fields


def places_of(key: str, fields: Any = None) -> list[str]:
    """Find the dotted keys of a recipe whose last part is `key`, or has the initials `key`.

    For example, `wd` finds `train.optimizer.weight_decay`. Keys with the fewest dots come first.

    Args:
        key: a name or initials, without a dot.
        fields: the fields of the recipe. Names that the recipe chooses, such as those of its
            blocks, replace `NAME` in the keys.
    """
    last = {full: full.rpartition(".")[2] for full in all_keys()}
    found = [full for full, name in last.items() if name == key]
    found = found or [full for full, name in last.items() if _initials(name) == key]
    named = [one for full in found for one in _named(full.split("."), fields)]
    return sorted(dict.fromkeys(named), key=lambda full: (full.count("."), full))


def _places_of_synonym(name: str, fields: Any) -> Iterable[str]:
    """Find the dotted keys of a name in `synonyms`, which may be a dotted key itself."""
    return _named(name.split("."), fields) if name in all_keys() else places_of(name, fields)


def listed(places: list[str]) -> str:
    """Join dotted keys to a phrase such as `a, b, c or one of 2 more`."""
    shown = places[:LISTED]
    more = len(places) - len(shown)
    if more:
        return f"{', '.join(shown)} or one of {more} more"
    return " or ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


def _initials(name: str) -> str:
    """Return the initials, such as `lr` for `learning_rate`; empty for a single word."""
    words = name.split("_")
    return "".join(word[0] for word in words if word) if len(words) > 1 else ""


def _near(key: str) -> list[str]:
    names = {full.rpartition(".")[2] for full in all_keys()}
    return difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.8)


def _named(parts: list[str], fields: Any) -> Iterator[str]:
    """Yield a dotted key once for each name that the recipe uses in place of `NAME`."""
    if NAME not in parts:
        yield ".".join(parts)
        return
    at = parts.index(NAME)
    inside = _section_at(".".join(parts[:at]), fields)
    names = list(inside) if isinstance(inside, Mapping) else []
    for name in names or [NAME]:
        yield ".".join([*parts[:at], str(name), *parts[at + 1 :]])


Notify = Callable[[str], object]


def override_recipe(
    written: Mapping[str, Any], overrides: Iterable[str], notify: Notify
) -> dict[str, Any]:
    """Apply `section.key=value` settings to the fields of a recipe.

    `section.kind=value` keeps the keys that both kinds have. `null` removes an item with a name
    chosen by the user, such as a block. Fewer steps shorten the file's warm-up in proportion.
    `train.minutes` replaces the file's `train.steps`, and vice versa. `notify` is called with a
    line for each key that is dropped or shortened.

    Raises:
        ConfigError: a setting cannot be applied.
    """
    settings = list(overrides)
    _check_preset(written.get("model"), settings)
    fields = _with_preset_if_cut(written, settings)

    def keep(place: str, section: dict[str, Any], kind: Any) -> dict[str, Any]:
        return _kept(place, section, kind, notify)

    fields = apply_overrides(fields, settings, keep, configs_at)
    for setting in settings:
        _remove_if_null(fields, setting.partition("=")[0])
    _check_pattern(fields.get("model"), settings)
    _keep_one_length(fields, settings, notify)
    return _fit_warmup(written, fields, notify)


def _check_preset(model: Any, settings: list[str]) -> None:
    """Raise an error for a new preset if the recipe's own model settings would override it."""
    if not isinstance(model, dict) or "blocks" not in model or "preset" in model:
        return
    for path, _, name in (setting.partition("=") for setting in settings):
        if path == "model.preset":
            raise ConfigError(
                "the recipe defines its own blocks, which would override the preset; "
                f"replace the whole model: 'model={{preset: {name}}}'",
                path,
            )


def _with_preset_if_cut(written: Mapping[str, Any], settings: list[str]) -> Mapping[str, Any]:
    """Replace a recipe's preset by its fields if a setting removes a part or changes a `kind`.

    Other settings are merged into the preset later. Merging cannot remove parts. It also replaces a
    whole section if the `kind` differs, including the keys that both kinds have.
    """
    cut = any(
        path.startswith("model.") and (path.endswith(".kind") or value == "null")
        for path, _, value in (setting.partition("=") for setting in settings)
    )
    named = apply_overrides(written, [s for s in settings if s.startswith("model.preset=")])
    model = named.get("model")
    if not cut or not isinstance(model, dict) or "preset" not in model:
        return written
    changes = {key: value for key, value in model.items() if key != "preset"}
    return {**written, "model": preset_with(str(model["preset"]), changes)}


def _kept(place: str, section: dict[str, Any], kind: Any, notify: Notify) -> dict[str, Any]:
    """Return the keys that a section keeps when its kind changes; notify about dropped keys."""
    configs = configs_at(place)
    new, old = configs.get(str(kind)), configs.get(str(section.get("kind")))
    if new is None:  # validation reports the unknown kind
        return section
    kept = {
        name: value
        for name, value in section.items()
        if name in new.model_fields and name != "kind" and not _own(name, new, old)
    }
    left_out = [
        f"{name}={value}" if isinstance(value, int | float | str) else name
        for name, value in section.items()
        if name not in (*kept, "kind") and not (old and _is_default(old, name, value))
    ]
    if left_out:
        was = f" of kind {section['kind']}" if "kind" in section else ""
        notify(f"{place}.kind={kind} drops {', '.join(left_out)}{was}")
    return kept


def _own(name: str, *configs: type[Config] | None) -> bool:
    """Return True if a setting is marked in one of the configs as specific to its kind."""
    fields = [config.model_fields.get(name) for config in configs if config]
    return any(isinstance(mark, OfItsKind) for field in fields if field for mark in field.metadata)


def _is_default(config: type[Config], name: str, value: Any) -> bool:
    """Return True if a setting equals its default."""
    if (field := config.model_fields.get(name)) is None:
        return False
    default = field.get_default(call_default_factory=True)
    return (default.to_dict() if isinstance(default, Config) else default) == value


def _remove_if_null(fields: dict[str, Any], path: str) -> None:
    """Remove an item that was set to null, if its name is chosen by the user, such as a block."""
    *sections, name = path.split(".")
    inside: Any = fields
    for section in sections:
        inside = inside.get(section) if isinstance(inside, dict) else None
    if isinstance(inside, dict) and inside.get(name, NAME) is None and names_at(".".join(sections)):
        del inside[name]


def _check_pattern(model: Any, settings: list[str]) -> None:
    """Raise an error if `model.pattern` contains a block that a setting removes."""
    pattern = model.get("pattern") if isinstance(model, dict) else None
    if not isinstance(pattern, list | tuple) or not isinstance(model.get("blocks"), dict):
        return
    for path in (setting.partition("=")[0] for setting in settings):
        name = path.removeprefix("model.blocks.")
        if name != path and name in pattern and name not in model["blocks"]:
            left = [other for other in pattern if other in model["blocks"]]
            left = left[:1] if len(set(left)) == 1 else left
            as_by = f", for example 'model.pattern=[{', '.join(left)}]'" if left else ""
            raise ConfigError(
                f"model.pattern still uses the block that null removes; change it too{as_by}", path
            )


def _keep_one_length(fields: dict[str, Any], settings: list[str], notify: Notify) -> None:
    """Remove the file's `train.steps` if a setting sets `train.minutes`, and vice versa."""
    train, given = fields.get("train"), {setting.partition("=")[0] for setting in settings}
    if not isinstance(train, dict):
        return
    for new, old in (("minutes", "steps"), ("steps", "minutes")):
        is_set = f"train.{new}" in given and f"train.{old}" not in given
        if is_set and train.get(new) is not None and train.get(old) is not None:
            notify(f"train.{new}={train[new]} replaces train.{old}={train.pop(old)}")


def _fit_warmup(
    written: Mapping[str, Any], fields: dict[str, Any], notify: Callable[[str], object]
) -> dict[str, Any]:
    """Shorten a recipe's warm-up if it does not fit into the steps that a setting sets.

    Its fraction of the steps stays as in `written`, the fields of the file. A warm-up that is
    itself overridden is not changed.
    """
    try:
        before, now = written["train"], fields["train"]
        warmup, steps = now["schedule"]["warmup_steps"], now["steps"]
        if (
            before["schedule"]["warmup_steps"] != warmup
            or not 0 < steps <= warmup < before["steps"]
        ):
            return fields
        short = warmup * steps // before["steps"]
    except (KeyError, TypeError):  # a default, or an error that validation reports
        return fields
    notify(
        f"train.schedule.warmup_steps is shortened to {short}, in proportion to "
        f"train.steps={steps}: the recipe warms up for {warmup} of its {before['steps']} steps"
    )
    schedule = {**now["schedule"], "warmup_steps": short}
    return {**fields, "train": {**now, "schedule": schedule}}


def on_workers(
    fields: dict[str, Any], workers: int, *, data_is_given: bool = False
) -> dict[str, Any]:
    """Set `parallel.data` of a recipe so that it needs `workers` processes.

    If `data_is_given`, the recipe's own `parallel.data` must not change.

    Raises:
        ConfigError: no `parallel.data` gives this number of processes, the recipe's own value gives
            another number, or `parallel` is invalid.
    """
    parallel = fields.get("parallel") or {}
    if not isinstance(parallel, dict):
        return fields  # validation of the recipe reports it
    try:
        divided = ParallelismConfig.from_dict({**parallel, "data": 1, "expert": 1}).on(workers)
    except ConfigError as error:
        raise error.below("parallel") from None
    if data_is_given and parallel["data"] != divided.data:
        raise ConfigError(
            f"data={parallel['data']} does not give {workers} processes, but {divided.data} does; "
            "remove data",
            "parallel",
        )
    # `expert` is added last: it can be validated only with the final number of processes.
    return {**fields, "parallel": divided.to_dict() | {"expert": parallel.get("expert", 1)}}
