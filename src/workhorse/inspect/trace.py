"""Record, replace and differentiate every tensor of a forward pass.

A tensor is named after the module that makes it or reads it, as `print(decoder)` shows them:
`layers.0.attention` is the output of that module, and `layers.0.attention.x` its input `x`. So
`layers.3.attention.q_proj.x` can be replaced without changing what `k_proj` reads.
`workhorse.inspect.names` adds the names of TransformerLens.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from threading import Lock
from typing import Any, cast
from weakref import proxy

import torch
from torch import Tensor, nn

from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.execute.body import sharing_copy
from workhorse.inspect.names import View, resolve
from workhorse.model.model import Model
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import Eager
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.transforms.record import is_body

Edit = Tensor | Callable[[Tensor], Tensor]
"""A new value for a tensor, or a function from the tensor to its new value."""
Edits = Mapping[str, Edit]
"""Edits by the names of tensors; a name with `*` applies to every name that it matches."""


class Trace(Mapping[str, Tensor]):
    """The tensors of one forward pass, by name, in the order in which they were computed.

    Attributes:
        tokens: the token ids, (batch, seq).
        logits: the logits, (batch, seq, vocab).
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, tensors: dict[str, Tensor]) -> None:
        self.tokens = tokens
        self._decoder = decoder
        self._tensors = tensors

    @property
    def logits(self) -> Tensor:
        return self["head"]

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of a name, or of TransformerLens's name for it.

        Raises:
            WorkhorseError: no tensor has this name, or it was not kept.
        """
        own, view = resolve(self._decoder, name)
        if own not in self._tensors:
            raise WorkhorseError(f"no tensor {name!r}; {nearest(own, self._tensors)}")
        return view.read(self._tensors[own])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and resolve(self._decoder, name)[0] in self._tensors

    def get(self, key: str, default: Any = None) -> Any:
        # `Mapping.get` expects a `KeyError`.
        return self[key] if key in self else default  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def gradients(self, of: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Gradients of a scalar with respect to tensors of this pass.

        The `grad` of the parameters does not change, and several scalars can be differentiated.

        Args:
            of: a scalar computed from this trace, such as `run.logits[0, -1, 42]`.
            names: names of the tensors; None: every tensor that the scalar depends on.

        Returns:
            The gradients, each with the shape of its tensor; zeros if the scalar does not depend on
            a tensor in `names`.

        Raises:
            WorkhorseError: the pass was traced without `gradients=True`, or `of` is not a scalar.
        """
        if not isinstance(of, Tensor) or of.grad_fn is None:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WorkhorseError(
                "of has no gradients; compute it from a trace with gradients=True, outside no_grad"
            )
        if of.numel() != 1:
            raise WorkhorseError(f"of has shape {tuple(of.shape)}; give a scalar, such as its sum")
        wanted = [name for name in names or self if self[name].requires_grad]
        views = {name: resolve(self._decoder, name) for name in wanted}
        inputs = [self._tensors[own] for own, _ in views.values()]
        slopes = torch.autograd.grad(of, inputs, retain_graph=True, allow_unused=True)
        found = {
            name: view.gradient(slope)
            for (name, (_, view)), slope in zip(views.items(), slopes, strict=True)
            if slope is not None
        }
        return (
            found if names is None else {n: found.get(n, torch.zeros_like(self[n])) for n in names}
        )


class Tracer:
    """Runs a decoder and records its tensors, many times.

    It runs a copy of the decoder's modules with the same parameters: the reference, with the kernel
    `eager`, which computes the attention matrix. So the decoder itself gets no hooks, and later
    changes of its weights are seen, but no later switch of its adapter. Dropout is off.

    Args:
        decoder: the decoder as its config builds it (`Model.reference`), also quantised or with an
            adapter.

    Raises:
        WorkhorseError: the decoder was prepared for execution, so its modules were replaced.
    """

    def __init__(self, decoder: Decoder) -> None:
        check_reference(decoder)
        self._traced = decoder
        self.decoder = sharing_copy(decoder).eval()
        for block in cast(list[Any], list(self.decoder.layers)):
            block.attention.kernel = _eager(block.attention)
        self._edits: dict[str, tuple[Edit, View]] = {}
        self._patterns: list[str] = []
        self._unused: set[str] = set()
        self._keep: Sequence[str] = ()
        self._cut = False
        self._seen: dict[str, Tensor] = {}
        self._running = Lock()
        # Weak, so that no cycle of references delays the release of weights until a collection.
        tracer = cast(Tracer, proxy(self))
        for path, module in self.decoder.named_modules():
            if path:
                module.register_forward_pre_hook(partial(Tracer._before, tracer, path))
                module.register_forward_hook(partial(Tracer._after, tracer, path))

    def __call__(
        self,
        tokens: Tensor | Sequence[int],
        *,
        edits: Edits | None = None,
        keep: Sequence[str] = ("*",),
        gradients: bool = False,
    ) -> Trace:
        """Run one forward pass; see `trace` for the arguments."""
        if isinstance(keep, str) or not isinstance(keep, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WorkhorseError(f"keep={shown(keep)} is not a list; give a list of names")
        if not isinstance(edits, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WorkhorseError(f"edits={shown(edits)}; give a dictionary of edits by name")
        if not self._running.acquire(blocking=False):
            raise WorkhorseError(
                "this Tracer runs a pass already; make another for a pass in an edit or a thread"
            )
        try:
            self._edits = self._resolved(edits or {})
            self._patterns = [name for name in self._edits if "*" in name]
            self._unused = set(self._edits)
            self._keep = ("head", *(resolve(self.decoder, name)[0] for name in keep))
            self._cut, self._seen = gradients, {}
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                tokens = as_batch(tokens, self.decoder)
                self.decoder(tokens)
            if self._unused:
                name = min(self._unused)
                raise WorkhorseError(
                    f"edits: no tensor {name!r} in this pass; list the names with list(run)"
                )
            return Trace(self._traced, tokens, self._seen)
        finally:
            self._edits, self._seen = {}, {}
            self._running.release()

    def _resolved(self, edits: Edits) -> dict[str, tuple[Edit, View]]:
        found: dict[str, tuple[Edit, View]] = {}
        for name, edit in edits.items():
            own, view = resolve(self.decoder, name)
            if own in found:
                raise WorkhorseError(f"edits: {name} and another name are the same tensor {own}")
            if not isinstance(edit, Tensor) and not callable(edit):
                raise WorkhorseError(f"edits: {name}={shown(edit)}; give a tensor or a function")
            found[own] = edit, view
        return found

    def _before(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        named = zip(_parameters(type(module)), args, strict=False)
        seen = [
            # A view, so that the gradient of an input excludes the other readers of the tensor.
            self._visit(f"{path}.{name}", arg.view_as(arg) if self._cut else arg)
            if isinstance(arg, Tensor) and not hasattr(module, name)
            else arg
            for name, arg in named
        ]
        return (*seen, *args[len(seen) :])

    def _after(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del module, args
        if isinstance(output, Tensor):
            if self._cut and path == "embedding.tokens":  # so that there is something to derive by
                output = output.detach().requires_grad_()
            return self._visit(path, output)
        fields: dict[str, Tensor] = output._asdict()  # all other outputs are named tuples
        return output._replace(
            **{name: self._visit(f"{path}.{name}", value) for name, value in fields.items()}
        )

    def _visit(self, name: str, value: Tensor) -> Tensor:
        for pattern in [name, *self._patterns]:
            if pattern in self._edits and (pattern == name or fnmatchcase(name, pattern)):
                value = _edited(name, value, *self._edits[pattern])
                self._unused.discard(pattern)
        if any(name == pattern or fnmatchcase(name, pattern) for pattern in self._keep):
            self._seen[name] = value
        return value


def trace(
    model: Model | Decoder,
    tokens: Tensor | Sequence[int] | str,
    *,
    edits: Edits | None = None,
    keep: Sequence[str] = ("*",),
    gradients: bool = False,
) -> Trace:
    """Run one forward pass, and return its tensors by name.

    Args:
        model: a model, whose reference is run, or a decoder. `Tracer` is faster for many passes.
        tokens: token ids, (batch, seq) or (seq); for a `Model` also a string.
        edits: new values of tensors, by name. An edit of an output changes all its readers; an edit
            of an input changes only the module that reads it. A function gets a copy of the tensor.
        keep: names of the tensors to record; default: all. The logits are always recorded.
        gradients: True to be able to call `Trace.gradients`.

    Raises:
        WorkhorseError: the decoder was prepared for execution, the tokens are not token ids of the
            decoder, no tensor has the name of an edit, or an edit changes shape or dtype.
    """
    decoder = model.reference if isinstance(model, Model) else model
    if isinstance(model, Model) and isinstance(tokens, str):
        tokens = model.encode(tokens)
    ids = cast(Tensor | Sequence[int], tokens)
    return Tracer(decoder)(ids, edits=edits, keep=keep, gradients=gradients)


def check_reference(decoder: Decoder) -> None:
    """Raise an error if a decoder cannot be traced."""
    if not hasattr(decoder, "unembed"):  # such as a Model
        raise WorkhorseError(f"{type(decoder).__name__} is not a decoder; give model.reference")
    if is_body(decoder):
        raise WorkhorseError(
            "the decoder is prepared for execution, so some tensors are never computed; "
            "give model.reference"
        )


def as_batch(tokens: Tensor | Sequence[int], decoder: Decoder) -> Tensor:
    """Token ids as a tensor (batch, seq) on the decoder's device.

    Raises:
        WorkhorseError: they are not token ids.
    """
    try:
        ids = torch.as_tensor(tokens, device=decoder.device)
    except (TypeError, ValueError, RuntimeError):
        raise WorkhorseError(f"tokens={shown(tokens)} are not token ids; give integers") from None
    ids = ids if ids.numel() else ids.long()  # an empty list became a tensor of floats
    ids = ids.clone() if ids.is_inference() else ids
    return ids[None] if ids.ndim == 1 else ids


def _eager(attention: SelfAttention) -> Eager:
    """The kernel `eager` with the options and the sinks of an attention's own kernel."""
    own = attention.kernel
    made = Eager(own.scoring, attention.n_heads)
    made.sinks = own.sinks
    return made.eval()


@cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the arguments of a module's `forward`. PyTorch's `input` is called `x`, as ours."""
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    return tuple("x" if name == "input" else name for name in names)


def _edited(name: str, value: Tensor, edit: Edit, view: View) -> Tensor:
    old = view.read(value)
    # A copy, because a function may change its argument, and other tensors share the memory.
    new = edit if isinstance(edit, Tensor) else edit(old.clone())
    if not isinstance(new, Tensor):
        raise WorkhorseError(f"edits: {name} became {shown(new)}; return a tensor")
    if new.shape != old.shape or new.dtype != old.dtype or new.is_meta != old.is_meta:
        raise WorkhorseError(
            f"edits: {name} became {_described(new)}; it is {_described(old)}, so return that"
        )
    return view.write(new.to(old.device), value)


def _described(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}" + (" without values (meta)" if x.is_meta else "")
