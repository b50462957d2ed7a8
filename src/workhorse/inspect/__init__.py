"""Look inside a model: record, replace and differentiate the tensors of a forward pass."""

from workhorse.inspect.attribution import Attribution, attribute
from workhorse.inspect.graph import Graph, attribution_graph
from workhorse.inspect.heads import (
    KINDS,
    head_labels,
    head_scores,
    patterns,
    repeated_tokens,
    scores_of,
)
from workhorse.inspect.interventions import (
    Edges,
    Patching,
    Place,
    ablate,
    edge_scores,
    patch,
    patch_path,
)
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
    "attribute",
    "attribution_graph",
    "edge_scores",
    "head_labels",
    "head_scores",
    "logit_lens",
    "neighbours",
    "patch",
    "patch_path",
    "patterns",
    "repeated_tokens",
    "scores_of",
    "statistics",
    "stream_norms",
    "streams",
    "trace",
]
