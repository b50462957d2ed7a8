"""Write `docs/families.md`: every model type measured beside transformers.

python -m tests.parity.table [--out docs/families.md] [TYPE ...]
"""

import argparse
import platform
import tempfile
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from tests.parity import reference
from tests.parity.all_cases import ALL
from tests.parity.rounding import ROWS, SEQ, Rounding, measure
from workhorse.models.huggingface import MODEL_TYPES, family

HEADING = """\
# Families: what is read and written, measured

Every model type of Hugging Face transformers that Workhorse reads and writes, beside transformers
{version} on small random weights in float32 (PyTorch {torch}, CPU). Made by `make families`; the
same checks run in the tests (`tests/parity/`), on the same shapes (`tests/parity/cases/`).

- **logits, cached, ragged**: the largest difference from transformers' logits, relative to their
  scale, over all shapes: of whole texts; in uneven chunks through our cache; of rows of different
  lengths padded to one batch. The bound is 1e-5. "by length": its angles depend on the length of
  the text (dynamic NTK, LongRoPE) in some shapes, which no chunks can equal; the others count.
- **generated**: greedy and with 3 beams, 8 tokens of 3 prompts, the same tokens as `generate`.
- **back**: written again by us, every tensor has the same name, shape and bytes,
  `AutoModelForCausalLM` loads it with nothing missing or unexpected, and its logits differ by this.
- **bfloat16**: the root mean square error of our logits in bfloat16, relative to float32's, over
  all shapes; **×**: that error over transformers' own, in the shape where it is largest. All
  weights are numbers of bfloat16, so the error is that of computing; {seeds} random models of each
  shape, {tokens:,} tokens each, both sides on their plain path with their default attention
  (`execution="reference"` here).
- **near ties**: tokens left out of the last two, on both sides, because rounding made a router
  choose another expert for them or for a token before them, in their model or in ours.

"""

COLUMNS = (
    *("model type", "class", "shapes", "logits", "cached", "ragged", "generated", "back"),
    *("bfloat16", "×", "near ties"),
)
SUMMARY = """
{types} model types, {shapes} shapes. In bfloat16 our error is {median:.3f} of transformers' in the
median shape and {worst:.3f} at most (`{where}`). Decoding token by token with a cache and
the native operators, measured on the first shape of each type: {native_median:.3f} and
{native_worst:.3f} (`{native_where}`) of the error of transformers' whole pass.
Measured on {cpu}.
"""
SEEDS = 2


NOTES = """
PaLM was never released: `tests/models/test_unreleased.py` holds it to a forward pass written
from its paper's equations, to 1e-5. The text parts of `gemma3`, `llama4`, `mistral3`, `aria` and
`cohere_compass` are read out of the multimodal models (`tests/parity/test_multimodal.py`).

## Where transformers is not followed, or an option is refused

- `phimoe` past its original length: transformers keeps the short LongRoPE factors, we take the
  long ones.
- `falcon` with ALiBi: transformers' eager attention adds the biases twice; the cases use its
  sdpa.
- `mpt`: transformers ignores `alibi_bias_max`; it is honoured on reading, and only 8 is written.
- `olmoe` with `clip_qkv`, `deepseek_v2` with `norm_topk_prob`, `gemma3_text` with
  `attn_logit_softcapping`, `phimoe` with other than two experts a token: refused, each with its
  reason.
- `hunyuan_v1_*`: `alpha` of its scaling is read into theta, and theta is what is written back.
- `bitnet` with a `quantization_config`: refused. Its linear layers round weights and inputs, and
  ours are those that are not rounded.
- `internlm3` and `iquestcoder` are LLaMA's class in transformers; a run exports as `llama`.

## Not there

Of the other types that transformers {version} maps to a causal language model:

| what it would take | types |
|---|---|
| nothing at all: their files say another type | `gpt-sw3` (`gpt2`), `llama4` (`llama4_text`), `gemma3` (`gemma3_text`) |
| a factor on the values | `mimo_v2_flash` |
| a softplus gate for each head, a cap on a router's logits | `laguna` |
| experts in attention | `jetmoe` |
| a residual stream weighed layer by layer, a gate with a bias | `beam` |
| layers that are shared, nested or repeated, a difference of two attentions | `gemma3n*`, `gemma4*`, `diffllama`, `longcat_flash`, `hrm_text` |
| attention that chooses what it sees, or is linear | `deepseek_v32`, `deepseek_v4`, `glm_moe_dsa`, `axk2`, `hy_v4`, `dots3_note*`, `minimax`, `minimax_m3_vl_text`, `kimi_linear`, `bailing_hybrid`, `qwen3_next`, `qwen3_5*`, `qwen4_exp*`, `doge` |
| recurrences or convolutions | `mamba`, `mamba2`, `falcon_mamba`, `rwkv`, `xlstm`, `jamba`, `bamba`, `zamba`, `zamba2`, `zaya`, `falcon_h1`, `nemotron_h`, `lfm*`, `granitemoehybrid`, `olmo_hybrid`, `recurrent_gemma`, `inkling*` |
| bytes instead of tokens, hashing, permutations, segments | `blt`, `reformer`, `xlnet`, `xlm`, `cpmant` |

What is left are encoders run as decoders (`bert` and its kin), decoders that attend to an encoder
(`bart` and its kin, `whisper`, `trocr`, …), and models whose tokens are images or sound (`emu3`,
`fuyu`, `git`, `mllama`, `moshi`, `musicgen`, `phi4_multimodal`, …): other architectures than this
decoder.
"""  # noqa: E501 a row of a table is a line


@dataclass
class Ratios:
    """Our errors in bfloat16 in parts of transformers', by model type, shape by shape."""

    plain: dict[str, list[float]] = field(default_factory=dict)
    native: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, model_type: str, cases: list[dict[str, Any]]) -> list[str]:
        """Cells of a model type's row."""
        shapes: list[Rounding] = []
        for number, options in enumerate(cases):
            runs = [measure(model_type, options, s, native=number + s == 0) for s in range(SEEDS)]
            shapes.append(reduce(add, [plain for plain, _ in runs]))
            self.native.setdefault(model_type, []).extend(one.ratio for _, one in runs if one)
        self.plain[model_type] = [one.ratio for one in shapes]
        whole = reduce(add, shapes)
        left_out = 1 - whole.kept / whole.tokens
        return [
            f"{(whole.ours / whole.scale) ** 0.5:.1e}",
            f"{max(self.plain[model_type]):.3f}",
            f"{left_out:.0%}" if left_out else "",
        ]

    def summary(self) -> str:
        """The line below the table."""
        (median, worst, where), native = map(_median_and_worst, (self.plain, self.native))
        return SUMMARY.format(
            types=len(self.plain),
            shapes=sum(map(len, self.plain.values())),
            median=median,
            worst=worst,
            where=where,
            native_median=native[0],
            native_worst=native[1],
            native_where=native[2],
            cpu=_cpu(),
        )


def _median_and_worst(ratios: dict[str, list[float]]) -> tuple[float, float, str]:
    every = [ratio for one in ratios.values() for ratio in one]
    worst = max(every)
    return median(every), worst, next(name for name, one in ratios.items() if worst in one)


def _cpu() -> str:
    """The processor's name, and what of it matters for bfloat16."""
    if not Path("/proc/cpuinfo").exists():
        return platform.processor()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    said = dict(
        reversed([[x.strip() for x in line.split(":", 1)] for line in lines if ":" in line])
    )
    flags = said.get("flags", "").split()
    units = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
    having = [name for flag, name in units.items() if flag in flags]
    return f"{said.get('model name', platform.processor())} ({', '.join(having) or 'neither'})"


def row(model_type: str, cases: list[dict[str, Any]], ratios: Ratios) -> str:
    """One line of the table; raises where a check that is no number fails."""
    figures: dict[str, list[float]] = {"full": [], "cached": [], "ragged": [], "back": []}
    by_length, same = False, True
    for number, options in enumerate(cases):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pair = reference.make(model_type, options, folder / "theirs")
            figures["full"].append(reference.full(pair))
            figures["ragged"].append(reference.ragged(pair))
            if reference.depends_on_length(pair):
                by_length = True
            else:
                figures["cached"].append(reference.cached(pair))
            if number == 0:
                for beams in (1, 3):
                    ours, theirs = reference.generations(pair, beams)
                    same = same and ours == theirs
            figures["back"].append(reference.written_back(pair, folder / "ours"))
    cells = [
        f"`{model_type}`",
        family(model_type).architecture,
        str(len(cases)),
        f"{max(figures['full']):.1e}",
        f"{max(figures['cached']):.1e}" + (" (by length)" if by_length else ""),
        f"{max(figures['ragged']):.1e}",
        "equal" if same else "**differ**",
        f"{max(figures['back']):.0e}" if max(figures["back"]) else "0",
        *ratios.measure(model_type, cases),
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Measure the given types, or all, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    types = arguments.types or list(MODEL_TYPES)
    text = HEADING.format(
        version=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        seeds=SEEDS,
        tokens=ROWS * SEQ,
    )
    text += f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    ratios = Ratios()
    for model_type in types:
        line = row(model_type, ALL[model_type], ratios)
        print(line, end="", flush=True)
        text += line
    text += ratios.summary() + NOTES.format(version=transformers.__version__)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
