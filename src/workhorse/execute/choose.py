"""Choice of how a model is executed, and the line that announces it."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from workhorse.devices.instructions import cpu_has
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend, ModuleBackend
from workhorse.execute.body import Execution, NativeModule, body_of
from workhorse.execute.compiled.compiled_step import CompiledStep
from workhorse.execute.compiled.fixed_step import CapturedStep, FixedStepBackend, why_not_fixed
from workhorse.execute.native_decoding.layers import ATTENDED, attend_natively, stream_weights
from workhorse.execute.native_decoding.native_step import NativeStepBackend
from workhorse.native import Library, Operators, resolve
from workhorse.nn import Decoder
from workhorse.nn.elementwise import Sum, Unchanged
from workhorse.nn.embedding import heads_in
from workhorse.transforms.quantization import QuantizedLinear

INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512_f": "AVX512",
    "avx2": "AVX2",
}
NOT_COUNTED = (nn.Identity, nn.Dropout, Unchanged, Sum)
"""Modules that are not counted in announcements: they compute nothing, or exist only for hooks."""


LIBRARIES: tuple[Library, ...] = ("decoding", "steps", "matrix_unit", "vectors")
"""Libraries of native operators that a decoding backend uses."""


def decoding_backend(
    reference: Decoder,
    execution: Execution = "auto",
    *,
    wait: bool = False,
    exact: bool = False,
    scores: bool = False,
) -> Backend:
    """Return a backend for fast generation; its decoder shares the parameters of the reference.

    Args:
        reference: the decoder on its final device, in its final dtype, and already quantised if it
            is to be quantised. It is not changed.
        execution: the execution mode. A program that is compiled for the first time on a machine
            takes tens of seconds at the first step.
        wait: True to wait until native operators are compiled, which each machine does once. False
            to compile them in the background: this decoder then runs without them, and models that
            are loaded later use them. It only applies to `auto`; `native` and `compiled` wait.
        exact: True to compute logits whose bits depend only on the tokens before them, if native
            steps can compute the model; see `Backend.is_invariant`.
        scores: True if log-probabilities must have the bits of training; see `Backend.scores`.

    Raises:
        WorkhorseError: there are no native operators, or the decoder cannot be compiled.
    """
    if execution == "reference":
        return ModuleBackend(reference, name=_reference(reference))
    if reference.device.type != "cpu":
        return _on_a_gpu(reference, execution)
    libraries = (*LIBRARIES, "training") if scores else LIBRARIES
    operators = resolve(*libraries, wait=wait or execution != "auto")
    body = body_of(reference).eval()
    dtype = next(reference.parameters()).dtype
    if dtype not in ATTENDED:
        operators = Operators(why_not={"decoding": f"no native operator computes in {dtype}"})
    if operators.decoding is not None:
        stream_weights(body, operators)
        attend_natively(body, operators.decoding)
    elif execution != "compiled":
        reason = operators.why_not["decoding"]
        if execution == "native":
            raise WorkhorseError(f"execution=native needs native operators: {reason}; choose auto")
        return ModuleBackend(reference, operators, _reference(reference, reason))
    backend: Backend = ModuleBackend(body, operators, _in_part(body))
    if execution == "compiled":
        backend = FixedStepBackend(backend, CompiledStep(body), "compiled")
    if operators.steps is not None:
        name = f"native ({instructions(body)})"
        backend = NativeStepBackend(backend, operators, exact=exact, name=name)
    return backend


def _on_a_gpu(reference: Decoder, execution: Execution) -> Backend:
    """`decoding_backend` for a GPU: steps are CUDA graphs, so the GPU never waits for Python."""
    body = body_of(reference).eval()
    modules = ModuleBackend(body)
    compiled = CompiledStep(body) if execution == "compiled" else None
    reason = "no native steps" if reference.device.type != "cuda" else why_not_fixed(body)
    if not reason:
        name = "native" if compiled is None else "compiled"
        return FixedStepBackend(modules, CapturedStep(body, compiled), f"{name} (CUDA graphs)")
    if execution == "native":
        raise WorkhorseError(f"execution=native is not possible: {reason}; choose auto")
    if compiled is not None:
        return FixedStepBackend(modules, compiled, "compiled")
    return ModuleBackend(reference, name=_reference(reference, reason))


def _reference(decoder: Decoder, reason: str = "") -> str:
    """Describe a decoder without native layers.

    Args:
        decoder: the decoder.
        reason: reason why native execution is not possible; empty if there is none.
    """
    if any(True for module in decoder.modules() for _ in _computed(module)):
        reason = "quantised layers use native operators"
    return "reference" + (f"; {reason}" if reason else "")


def training_announcement(objective: nn.Module, operators: Operators, compiled: bool) -> str:
    """One line for the user that says how training runs.

    Args:
        objective: the module that computes the loss, as `build_step` prepares it.
        operators: the native operators that it uses.
        compiled: True if PyTorch compiles the layers.
    """
    heads = heads_in(objective)  # see `TokenLogprobs`
    how = "reference" if operators.training is None else _in_part(objective, heads)
    if operators.training is None and "training" in operators.why_not:
        how += f"; {operators.why_not['training']}"
    return f"train: {how}" + ("; layers compiled by PyTorch" if compiled else "")


def instructions(module: nn.Module) -> str:
    """Name of the widest CPU instruction set that native operators use for a module's dtype."""
    bfloat16 = next(module.parameters()).dtype == torch.bfloat16
    usable = [one for one in INSTRUCTIONS if cpu_has(one) and (bfloat16 or "bf16" not in one)]
    return INSTRUCTIONS[usable[0]] if usable else "plain"


def _in_part(root: nn.Module, without: Sequence[nn.Module] = ()) -> str:
    """Describe how many modules are native, and name the classes of the other modules.

    Args:
        root: the module whose submodules are counted.
        without: submodules that are not counted.
    """
    native = {part for module in root.modules() if module is not root for part in _computed(module)}
    counted: list[bool] = []
    plain: dict[str, None] = {}

    def look(module: nn.Module) -> None:
        children = list(module.children())
        if not children and not isinstance(module, NOT_COUNTED):
            counted.append(module in native)
            if module not in native:
                plain[type(module).__name__] = None
        for child in children:
            if child not in without:
                look(child)

    look(root)
    rest = f"; by PyTorch: {', '.join(plain)}"
    line = f"native ({instructions(root)}), {sum(counted)} of {len(counted)} modules"
    return line + (rest if plain else "")


def _computed(module: nn.Module) -> Iterable[nn.Module]:
    """The modules that native operators compute when a module is called."""
    if isinstance(module, QuantizedLinear):
        return () if module.decoding is None else module.modules()
    return module.computed() if isinstance(module, NativeModule) else ()
