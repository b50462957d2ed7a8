"""Command-line overrides of a recipe, and messages for misplaced keys."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import yaml

from workhorse.config.base import Config, ConfigError, OfItsKind, parse_yaml
from workhorse.config.overrides import apply_overrides
from workhorse.parallel.config import ParallelismConfig
from workhorse.train.recipe.recipe import preset_with
from workhorse.train.recipe.reference import NAME, all_keys, configs_at, examples, names_at

LISTED = 3
"""The most places that an error names."""


def with_its_place(error: ConfigError, fields: Any) -> ConfigError:
    """An error about a key that also says where the key belongs, or how it is written.

    Args:
        error: as the configs raised it; returned unchanged if there is nothing to add.
        fields: of the recipe.
    """
    if error.missing_key:
        return _with_an_example(error, fields)
    key, place = error.unknown_key, error.path
    if not key:
        return error
    kinds = [kind for kind, config in configs_at(place).items() if key in config.model_fields]
    if kinds:
        reason = f"unknown key {key!r}, which belongs to kind: {' or '.join(sorted(kinds))}"
        return ConfigError(f"{reason}; choose that, or leave {key} out", place)
    places = places_of(key, fields)
    if "did you mean" not in error.reason:
        places = places or [full for name in _near(key) for full in places_of(name, fields)]
    inside = [full for full in places if place and full.startswith(f"{place}.")]
    if not places:
        return error
    return ConfigError(f"unknown key {key!r}; did you mean {listed(inside or places)}?", place)


def _with_an_example(error: ConfigError, fields: Any) -> ConfigError:
    """An error about a missing key that shows one, from the reference's examples."""
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
                f"{key!r} is missing; write one such as {' '.join(written.split())[1:-1]} "
                f"(see workhorse recipe {where})",
                place,
            )
    return error


def _section_at(place: str, fields: Any) -> Any:
    """The value at a dotted place of a recipe; None if there is none."""
    for part in place.split(".") if place else ():
        fields = fields.get(part) if isinstance(fields, Mapping) else None
    return fields


def places_of(key: str, fields: Any = None) -> list[str]:
    """The dotted keys of that name, or of that abbreviation (`lr`), in a recipe; nearest first.

    Args:
        key: a name without a dot.
        fields: of the recipe, whose own names stand in the keys; where it has none, `NAME` does.
    """
    last = {full: full.rpartition(".")[2] for full in all_keys()}
    found = [full for full, name in last.items() if name == key]
    found = found or [full for full, name in last.items() if _initials(name) == key]
    named = [one for full in found for one in _named(full.split("."), fields)]
    return sorted(dict.fromkeys(named), key=lambda full: (full.count("."), full))


def listed(places: list[str]) -> str:
    """A few of the places, in words."""
    shown = places[:LISTED]
    more = len(places) - len(shown)
    if more:
        return f"{', '.join(shown)} or one of {more} more"
    return " or ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


def _initials(name: str) -> str:
    """`lr` of `learning_rate`; empty for a single word."""
    words = name.split("_")
    return "".join(word[0] for word in words if word) if len(words) > 1 else ""


def _near(key: str) -> list[str]:
    names = {full.rpartition(".")[2] for full in all_keys()}
    return difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.8)


def _named(parts: list[str], fields: Any) -> Iterator[str]:
    """A dotted key with the recipe's own names where the reference has `NAME`."""
    if NAME not in parts:
        yield ".".join(parts)
        return
    at = parts.index(NAME)
    inside = _section_at(".".join(parts[:at]), fields)
    names = list(inside) if isinstance(inside, Mapping) else []
    for name in names or [NAME]:
        yield ".".join([*parts[:at], str(name), *parts[at + 1 :]])


Tell = Callable[[str], object]


def override_recipe(
    written: Mapping[str, Any], overrides: Iterable[str], tell: Tell
) -> dict[str, Any]:
    """The fields of a recipe overridden by `section.key=value` settings.

    `section.kind=value` keeps the keys that both kinds have. `null` removes an item that the user
    named, such as a block. Fewer steps shorten the file's warm-up in proportion; `train.minutes`
    takes the place of the file's `train.steps`, and the other way round.

    Args:
        written: the fields in the file.
        overrides: the settings.
        tell: called with a line for each key that is dropped or shortened.

    Raises:
        ConfigError: a setting cannot be applied.
    """
    settings = list(overrides)
    _check_preset(written.get("model"), settings)
    fields = _with_preset_if_cut(written, settings)

    def keep(place: str, section: dict[str, Any], kind: Any) -> dict[str, Any]:
        return _kept(place, section, kind, tell)

    fields = apply_overrides(fields, settings, keep, configs_at)
    for setting in settings:
        _remove_if_null(fields, setting.partition("=")[0])
    _check_pattern(fields.get("model"), settings)
    _keep_one_length(fields, settings, tell)
    return _fit_warmup(written, fields, tell)


def _check_preset(model: Any, settings: list[str]) -> None:
    """Refuse a preset under a model that is written out and would replace what is in it."""
    if not isinstance(model, dict) or "blocks" not in model or "preset" in model:
        return
    for path, _, name in (setting.partition("=") for setting in settings):
        if path == "model.preset":
            raise ConfigError(
                "the recipe's own model is written out, and would be written over the preset; "
                f"replace it whole: 'model={{preset: {name}}}'",
                path,
            )


def _with_preset_if_cut(written: Mapping[str, Any], settings: list[str]) -> Mapping[str, Any]:
    """The recipe with its preset written out where a setting takes something of it away.

    What is written over a preset cannot: another kind there, in a file, begins a new section.
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


def _kept(place: str, section: dict[str, Any], kind: Any, tell: Tell) -> dict[str, Any]:
    """The keys that a section keeps when its kind changes; the others are reported."""
    configs = configs_at(place)
    new, old = configs.get(str(kind)), configs.get(str(section.get("kind")))
    if new is None:  # which is told elsewhere
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
        tell(f"{place}.kind={kind} leaves out {', '.join(left_out)}{was}")
    return kept


def _own(name: str, *configs: type[Config] | None) -> bool:
    """Whether a setting means another thing in one of these kinds than in others."""
    fields = [config.model_fields.get(name) for config in configs if config]
    return any(isinstance(mark, OfItsKind) for field in fields if field for mark in field.metadata)


def _is_default(config: type[Config], name: str, value: Any) -> bool:
    """Whether a setting says what holds without it."""
    if (field := config.model_fields.get(name)) is None:
        return False
    default = field.get_default(call_default_factory=True)
    return (default.to_dict() if isinstance(default, Config) else default) == value


def _remove_if_null(fields: dict[str, Any], path: str) -> None:
    """Remove what was set to null where null is no value: under a name of the writer's choice."""
    *sections, name = path.split(".")
    inside: Any = fields
    for section in sections:
        inside = inside.get(section) if isinstance(inside, dict) else None
    if isinstance(inside, dict) and inside.get(name, NAME) is None and names_at(".".join(sections)):
        del inside[name]


def _check_pattern(model: Any, settings: list[str]) -> None:
    """Refuse to remove a block that the pattern still names."""
    pattern = model.get("pattern") if isinstance(model, dict) else None
    if not isinstance(pattern, list | tuple) or not isinstance(model.get("blocks"), dict):
        return
    for path in (setting.partition("=")[0] for setting in settings):
        name = path.removeprefix("model.blocks.")
        if name != path and name in pattern and name not in model["blocks"]:
            left = [other for other in pattern if other in model["blocks"]]
            left = left[:1] if len(set(left)) == 1 else left
            as_by = f", as by 'model.pattern=[{', '.join(left)}]'" if left else ""
            raise ConfigError(
                f"model.pattern uses the block that null removes; set it too{as_by}", path
            )


def _keep_one_length(fields: dict[str, Any], settings: list[str], tell: Tell) -> None:
    """Remove the file's `train.steps` if `train.minutes` is set, and the other way round."""
    train, given = fields.get("train"), {setting.partition("=")[0] for setting in settings}
    if not isinstance(train, dict):
        return
    for new, old in (("minutes", "steps"), ("steps", "minutes")):
        is_set = f"train.{new}" in given and f"train.{old}" not in given
        if is_set and train.get(new) is not None and train.get(old) is not None:
            tell(f"train.{new}={train[new]} takes the place of train.{old}={train.pop(old)}")


def _fit_warmup(
    written: Mapping[str, Any], fields: dict[str, Any], tell: Callable[[str], object]
) -> dict[str, Any]:
    """The fields of a recipe whose warm-up is shortened with the run.

    A file whose steps are overridden by so few that its warm-up does not end within them (a quick
    try) gets one in proportion. A warm-up that was itself overridden stays.

    Args:
        written: what the file says.
        fields: the same with overrides.
        tell: told in one line what is shortened.
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
    except (KeyError, TypeError):  # not written out, or wrong, which is told elsewhere
        return fields
    tell(
        f"train.schedule.warmup_steps is {short}, in proportion to train.steps={steps}: the "
        f"recipe's {warmup} are for {before['steps']} steps"
    )
    schedule = {**now["schedule"], "warmup_steps": short}
    return {**fields, "train": {**now, "schedule": schedule}}


def on_workers(
    fields: dict[str, Any], workers: int, *, data_is_given: bool = False
) -> dict[str, Any]:
    """The recipe with as much `parallel.data` as makes so many processes of its other divisions.

    Args:
        fields: of the recipe.
        workers: how many.
        data_is_given: whether its own `parallel.data` is to hold.

    Raises:
        ConfigError: there is none, it is not the one given, or `parallel` is not what it should be.
    """
    parallel = fields.get("parallel") or {}
    if not isinstance(parallel, dict):
        return fields  # the recipe will be refused
    try:
        divided = ParallelismConfig.from_dict({**parallel, "data": 1, "expert": 1}).on(workers)
    except ConfigError as error:
        raise error.below("parallel") from None
    if data_is_given and parallel["data"] != divided.data:
        raise ConfigError(
            f"data={parallel['data']} does not make {workers} processes, and {divided.data} does; "
            "leave it out",
            "parallel",
        )
    # Whether experts can be divided is known once there are so many processes.
    return {**fields, "parallel": divided.to_dict() | {"expert": parallel.get("expert", 1)}}
