import pytest

from workhorse.config.base import ConfigError
from workhorse.generate import GenerationConfig


def test_round_trip():
    config = GenerationConfig(
        temperature=0.7, top_p=0.9, logit_bias={3: -1.5}, stop=("a", "b"), stop_tokens=(), seed=3
    )
    assert GenerationConfig.from_json(config.to_json()) == config
    assert GenerationConfig.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("top_p", 2, "top_p=2 is not a probability; choose 0 < top_p <= 1"),
        ("top_p", 0, "top_p=0 is not a probability; choose 0 < top_p <= 1"),
        ("temperature", -0.5, "temperature=-0.5 is negative; choose 0 (greedy) or more"),
        ("top_k", 0, "top_k=0 is less than 1; choose 1 or more, or omit it"),
        ("min_p", 1.5, "min_p=1.5 is not a fraction; choose 0 <= min_p <= 1"),
        ("max_new_tokens", 0, "max_new_tokens=0 is less than 1; choose 1 or more"),
        (
            "repetition_penalty",
            0,
            "repetition_penalty=0 is not positive; choose more than 0",
        ),
        ("seed", -1, "seed=-1 is out of range; choose 0 to 2^63 - 1"),
        ("n_samples", 0, "n_samples=0 is less than 1; choose 1 or more"),
        ("beams", 0, "beams=0 is less than 1; choose 1 (no beam search) or more"),
        (
            "stop",
            ("",),
            "stop contains an empty string, which would end every completion; remove it",
        ),
        ("logprobs", -1, "logprobs=-1 is negative; choose 0 or more, or omit it"),
        ("speculate", -1, "speculate=-1 is negative; choose 0 (no guesses) or more"),
        (
            "temperature",
            1e-40,
            "temperature=1e-40 is too small to divide by; choose 0 (greedy), or 1e-06 or more",
        ),
        (
            "repetition_penalty",
            1e39,
            "repetition_penalty=1e+39 is out of range; choose 1e-06 to 1e+06",
        ),
        (
            "presence_penalty",
            -1e39,
            "presence_penalty=-1e+39 is out of range; choose -1e+09 to 1e+09",
        ),
        (
            "frequency_penalty",
            1e39,
            "frequency_penalty=1e+39 is out of range; choose -1e+09 to 1e+09",
        ),
        (
            "logit_bias",
            {5: 1e39},
            "logit_bias of token 5=1e+39 is out of range; choose -1e+09 to 1e+09",
        ),
        ("length_penalty", 1000, "length_penalty=1000 is out of range; choose -10 to 10"),
        ("n_samples", 2**40, "n_samples=1.09951e+12 is out of range; choose 1 to 8192"),
        ("beams", 2**40, "beams=1.09951e+12 is out of range; choose 1 to 8192"),
        ("stop", "x", "stop: expected a list, and 'x' is a string; write ['x']"),
        ("top_q", 1, "unknown key 'top_q'; did you mean 'top_p'?"),
    ],
)
def test_bounds(option, value, message):
    with pytest.raises(ConfigError) as error:
        GenerationConfig(**{option: value})
    assert str(error.value) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_temperature_must_be_finite(value):
    with pytest.raises(ConfigError, match=r"^temperature: "):
        GenerationConfig(temperature=value)


@pytest.mark.parametrize(
    "options",
    [
        {"beams": 2, "temperature": 0.7},
        {"beams": 2, "top_p": 0.9},
        {"beams": 2, "stop": ("x",)},
        {"beams": 2, "repetition_penalty": 1.2},
        {"beams": 2, "n_samples": 2},
        {"beams": 2, "seed": 1},
        {"beams": 2, "speculate": 2},
        {"temperature": 0, "top_k": 5},
        {"temperature": 0, "n_samples": 2},
        {"length_penalty": 0.5},
        {"early_stopping": True},
    ],
)
def test_an_option_that_would_not_be_read_is_refused(options):
    unread = list(options)[-1]
    with pytest.raises(
        ConfigError, match=rf"^{unread}=.* would have no effect: .*; (omit one|set beams)"
    ):
        GenerationConfig(**options)


def test_a_seed_beside_greedy_decoding_is_accepted() -> None:
    assert GenerationConfig(temperature=0, seed=1).seed == 1


def test_the_seed_of_the_last_sample_is_a_seed() -> None:
    most = 2**63 - 1
    assert GenerationConfig(seed=most - 1, n_samples=2).seed == most - 1
    with pytest.raises(
        ConfigError, match="the last sample's seed would be 9223372036854775808; choose"
    ):
        GenerationConfig(seed=most, n_samples=2)
