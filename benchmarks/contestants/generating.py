"""Cases shared by decoding, prompts and batches: one model, its contestants, and its limit."""

from benchmarks.contestants.limits import prompt_products, weights_read
from benchmarks.harness.contest import Case
from benchmarks.harness.shapes import BITS, DTYPES, PRECISIONS, PROMPT_TOKENS, Shape
from benchmarks.harness.worker import Contestant

OURS = "benchmarks.contestants.ours:generate"


def case(
    shape: Shape,
    precision: str,
    *,
    measure: str,
    batch: int,
    new_tokens: int,
    device: str,
    models: str,
) -> Case:
    """Ours, llama.cpp and transformers, greedy, after prompts of `PROMPT_TOKENS` random tokens.

    Args:
        shape: the model's shape.
        precision: one of `PRECISIONS`.
        measure: `decode` or `prefill`.
        batch: number of sequences.
        new_tokens: number of new tokens per sequence.
        device: `cpu` or `cuda`; llama.cpp takes part only on the CPU.
        models: the folder of stored models.
    """
    same = asked(shape.name, batch, new_tokens, models)
    own = same | {"precision": precision, "device": device}
    contestants = [
        Contestant("Workhorse", OURS, own | {"compiled": True}),
    ]
    if measure == "decode":
        contestants.append(
            Contestant(
                "Workhorse, not compiled",
                OURS,
                own | {"compiled": False},
            )
        )
    if batch > 1:
        exact = own | {"compiled": False, "exact": True}
        note = "not compiled, `exact`: the bits of a sequence do not depend on the batch"
        contestants.append(Contestant("Workhorse, exact", OURS, exact, note))
    skipped: tuple[str, ...] = ()
    if device == "cpu":
        contestants += _llama_cpp(same, precision)
    else:
        skipped = (f"llama.cpp: measured on the CPU only, not on {device}",)
    if precision in DTYPES:
        contestants.append(
            Contestant(
                "transformers",
                "benchmarks.peers.transformers:generate",
                same | {"precision": precision, "device": device},
            )
        )
    if measure == "prefill":
        limit = prompt_products(shape, precision, batch, device)
    else:
        limit = weights_read(shape, precision, batch, device)
    name = f"{shape.name} {precision}" + (f" batch {batch}" if batch > 1 else "")
    return Case(name, measure, "tokens/s", tuple(contestants), limit, skipped=skipped)


def asked(shape: str, batch: int, new_tokens: int, models: str) -> dict[str, object]:
    """The arguments that all contestants share."""
    return {
        "shape": shape,
        "batch": batch,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        "models": models,
    }


def _llama_cpp(same: dict[str, object], precision: str) -> list[Contestant]:
    """llama.cpp, and for quantised weights also llama.cpp without repacking them.

    Repacking usually makes it faster, but crashes on some processors. llama.cpp is then listed as
    failed.
    """
    theirs = PRECISIONS[precision]
    bits = f"{theirs}, {BITS[precision]:g} bits a weight"
    ways = {"llama.cpp": True}
    if precision not in DTYPES:
        ways["llama.cpp, not repacked"] = False
    return [
        Contestant(
            name,
            "benchmarks.peers.llama_cpp:generate",
            same | {"precision": theirs, "repack": repack},
            bits if repack else f"{bits}; use_extra_bufts=False",
        )
        for name, repack in ways.items()
    ]
