"""The table of options: what is made from it says what it says."""

from typing import Any

import pytest

from workhorse.checkpoints.huggingface import load
from workhorse.cli.verbs import chat, generate
from workhorse.generate import GenerationConfig
from workhorse.generate.options import Options, served, stored, table

OTHER: dict[str, Any] = {
    "logit_bias": {3: 1.0},
    "stop": ("a",),
    "stop_tokens": (2,),
    "shown_tokens": (2,),
    "truncate": "left",
    "temperature": 0.5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "processed_logprobs": True,
    "length_penalty": 0.5,
    "early_stopping": True,
    "exact": True,
}
"""A value of each option that is not its default; 7 for the others."""


def test_requests_share_a_sampler_only_if_it_chooses_alike() -> None:
    for name, row in table().items():
        fields: dict[str, Any] = {name: OTHER.get(name, 7)}
        if "sampling" not in row.option.read_by:
            fields["beams"] = 2
        plain = {"processed_logprobs": {"logprobs": 0}}.get(name, {})
        changed = GenerationConfig(**plain, **fields)
        same = changed.sampling_key == GenerationConfig(**plain).sampling_key
        assert same != row.option.chooses, name
    shaping = {*served(), *stored("always", "do_sample"), "logit_bias", "logprobs"}
    assert all(table()[name].option.chooses for name in shaping)


def test_every_option_has_a_row_with_help() -> None:
    assert list(table()) == list(GenerationConfig.model_fields)
    assert all(row.help.endswith(".") and len(row.help) > 20 for row in table().values())
    defaults = {name: getattr(Options, name) for name in table()}
    assert GenerationConfig().to_dict() == GenerationConfig(**defaults).to_dict()


@pytest.mark.parametrize("verb", [generate, chat])
def test_a_verb_has_the_flags_of_its_rows(verb: Any) -> None:
    flags = {name for name, row in table().items() if verb.command.name in row.option.verbs}
    params = {one.name: one for one in verb.command.params if one.name in table()}
    assert set(params) == flags
    for name, flag in params.items():
        assert f"--{name.replace('_', '-')}" in flag.opts
        assert flag.help


def test_generation_config_json_is_read_like_transformers() -> None:
    assert set(stored("do_sample")) == set(load._ONLY_SAMPLED)
    assert stored("always") == ("repetition_penalty",)


def test_a_request_has_the_numbers_of_the_table() -> None:
    schema = pytest.importorskip("workhorse.serve.schema")
    fields = schema.ChatRequest.model_fields
    assert set(served()) <= set(fields)
    for name, one in served().items():
        assert fields[name].description.startswith("Extension: ") == one.extension
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    outside = {
        name: [one.least - 1, *([] if one.most is None else [one.most + 1])]
        for name, one in served().items()
    }
    outside["top_k"].append(1.5)
    for name, values in outside.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                schema.ChatRequest.model_validate({**chat, name: value})
