"""Look inside a model: record, replace and differentiate the tensors of a forward pass."""

from workhorse.inspect.attribution import Attribution, attribute
from workhorse.inspect.graph import Graph, attribution_graph
from workhorse.inspect.trace import Edit, Edits, Trace, Tracer, trace

__all__ = [
    "Attribution",
    "Edit",
    "Edits",
    "Graph",
    "Trace",
    "Tracer",
    "attribute",
    "attribution_graph",
    "trace",
]
