"""Look inside a model: record, replace and differentiate the tensors of a forward pass."""

from workhorse.inspect.attribution import Attribution, attribute
from workhorse.inspect.circuits import Edges, edge_scores, patch_path
from workhorse.inspect.graph import Graph, attribution_graph
from workhorse.inspect.heads import (
    KINDS,
    attention_patterns,
    head_labels,
    head_scores,
    repeated_tokens,
)
from workhorse.inspect.interventions import Patching, Place, ablate, patch
from workhorse.inspect.lens import (
    Lens,
    Statistics,
    logit_lens,
    neighbours,
    statistics,
    stream_norms,
    streams,
)
from workhorse.inspect.trace import Edit, Edits, Trace, Tracer, trace

__all__ = [
    "KINDS",
    "Attribution",
    "Edges",
    "Edit",
    "Edits",
    "Graph",
    "Lens",
    "Patching",
    "Place",
    "Statistics",
    "Trace",
    "Tracer",
    "ablate",
    "attention_patterns",
    "attribute",
    "attribution_graph",
    "edge_scores",
    "head_labels",
    "head_scores",
    "logit_lens",
    "neighbours",
    "patch",
    "patch_path",
    "repeated_tokens",
    "statistics",
    "stream_norms",
    "streams",
    "trace",
]
