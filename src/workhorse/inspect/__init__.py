"""Look inside a model: record, replace and differentiate the tensors of a forward pass."""

from workhorse.inspect.attribution import Attribution, attribute
from workhorse.inspect.graph import Graph, attribution_graph
from workhorse.inspect.trace import (
    Edit,
    Edits,
    Trace,
    Tracer,
    trace,
)

__all__ = [
    "KINDS",
    "Attribution",
    "Edit",
    "Edits",
    "Graph",
    "Lens",
    "Statistics",
    "Trace",
    "Tracer",
    "attribute",
    "attribution_graph",
    "head_labels",
    "head_scores",
    "logit_lens",
    "neighbours",
    "patterns",
    "repeated_tokens",
    "scores_of",
    "statistics",
    "stream_norms",
    "streams",
    "trace",
]
