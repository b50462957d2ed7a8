"""A config made readable for llama.cpp: what it computes a little differently, and at what cost."""

from collections.abc import Iterable
from typing import Any

from workhorse.checkpoints.gguf.field_paths import WINDOW, Data, look_up, plain, put
from workhorse.nn import DecoderConfig

APPROXIMATIONS: tuple[tuple[str, object, object, str], ...] = (
    (
        "feed_forward.activation",
        "gelu",
        "gelu_tanh",
        "llama.cpp computes GELU in its tanh form; logits differ in the fourth digit",
    ),
    (
        "attention.position.scaling.truncate",
        False,
        True,
        "llama.cpp rounds the ends of YaRN's ramp to whole pairs; angles differ a little",
    ),
    (
        "attention.position.scaling.kind",
        "longrope",
        "longrope",
        "llama.cpp chooses LongRoPE's factors by the room of its context, not by the text's length",
    ),
)
"""A field, our value, what llama.cpp has instead, and what to tell the user."""


def readable(config: DecoderConfig, *, windows: bool) -> tuple[Data, list[str]]:
    """A config as the plain data that an architecture can compute, and what it costs.

    Args:
        config: ours.
        windows: whether the architecture knows sliding windows; else the context is cut to the
            narrowest, within which a window changes nothing.
    """
    data, remarks = plain(config), list[str]()
    layers: list[Data] = data["layers"]
    for path, ours, theirs, remark in APPROXIMATIONS:
        for layer in layers:
            if look_up(layer, path) == ours:
                put(layer, path, theirs)
                remarks += [remark] if remark not in remarks else []
    if not windows:
        narrowest = min(_windows(layers), default=data["max_seq_len"])
        if narrowest < data["max_seq_len"]:
            remarks.append(
                f"llama.cpp has no sliding window here; the file's context is {narrowest} tokens, "
                "within which it changes nothing"
            )
        data["max_seq_len"] = min(narrowest, data["max_seq_len"])
        for layer in layers:
            put(layer, WINDOW, None)
    return data, remarks


def _windows(layers: Iterable[Data]) -> list[int]:
    found: list[Any] = [look_up(layer, WINDOW) for layer in layers]
    return [window for window in found if isinstance(window, int)]
