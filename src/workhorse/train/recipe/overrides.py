"""Command-line overrides of a recipe."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from workhorse.config.base import Config, ConfigError, OfItsKind
from workhorse.config.overrides import apply_overrides
from workhorse.parallel.config import ParallelismConfig
from workhorse.train.recipe.keys import NAME, configs_at, section_at
from workhorse.train.recipe.recipe import Recipe, preset_with

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

    fields = apply_overrides(fields, settings, keep, partial(configs_at, Recipe))
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
    configs = configs_at(Recipe, place)
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
    above, _, name = path.rpartition(".")
    inside = section_at(above, fields)
    is_null = isinstance(inside, dict) and inside.get(name, NAME) is None
    if is_null and configs_at(Recipe, f"{above}.{NAME}"):
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
