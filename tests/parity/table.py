"""Write `docs/families.md`: measurements of every model type, compared with transformers.

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
# Families: supported model types, measured

`make families` compares every model type that Workhorse reads and writes with Hugging Face
transformers {version}, on small random weights in float32 (PyTorch {torch}, CPU). The tests run
the same checks (`tests/parity/`) on the same shapes (`tests/parity/cases.yaml`).

- **logits, cached, ragged**: the largest difference from transformers' logits, relative to their
  scale, over all shapes. `logits`: whole sequences. `cached`: uneven chunks through our cache.
  `ragged`: prompts of different lengths, padded to one batch. The bound is 1e-5. "by length": in
  some shapes the RoPE angles depend on the sequence length (dynamic NTK, LongRoPE), so chunks
  cannot give the same logits; these shapes are not in the figure.
- **generated**: the tokens are the same as with `generate` of transformers, greedy and with 3 beams
  (8 tokens for each of 3 prompts).
- **back**: the model written by Workhorse has the same tensor names, shapes and bytes.
  `AutoModelForCausalLM` loads it without missing or unexpected tensors. The column is the largest
  difference of its logits.
- **bfloat16**: the root mean square error of our logits in bfloat16, relative to float32, over all
  shapes. **×**: that error divided by transformers' error, in the shape with the largest ratio.
  The weights are rounded to bfloat16 first, so only the computation contributes errors. There are
  {seeds} random models of each shape with {tokens:,} tokens each. Both sides use their plain path
  with their default attention (`execution="reference"` here).
- **near ties**: the share of tokens excluded from the last two columns on both sides. Rounding made
  a router, in either model, choose another expert for the token or for an earlier one.

"""

COLUMNS = (
    *("model type", "class", "shapes", "logits", "cached", "ragged", "generated", "back"),
    *("bfloat16", "×", "near ties"),
)
SUMMARY = """
{types} model types, {shapes} shapes. In bfloat16 our error divided by transformers' error is
{median:.3f} in the median shape and {worst:.3f} in the worst (`{where}`). For decoding token by
token with a cache and the native operators, compared with transformers' whole pass, it is
{native_median:.3f} and {native_worst:.3f} (`{native_where}`), on the first shape of each type.
Measured on {cpu}.
"""
SEEDS = 2


NOTES = """
PaLM was never released. `tests/models/test_unreleased.py` compares it with a forward pass written
from the equations of its paper, to 1e-5. The text parts of `gemma3`, `llama4`, `mistral3`, `aria`
and `cohere_compass` are read from the multimodal models (`tests/parity/test_multimodal.py`).

## Deviations from transformers, and refused options

- `phimoe` beyond its original length: transformers keeps the short LongRoPE factors; we use the
  long ones.
- `falcon` with ALiBi: transformers' eager attention adds the biases twice; the cases use its
  sdpa attention.
- `mpt`: transformers ignores `alibi_bias_max`. Workhorse uses it on reading, and writes only 8.
- Refused with the reason: `olmoe` with `clip_qkv`, `deepseek_v2` with `norm_topk_prob`,
  `gemma3_text` with `attn_logit_softcapping`, and `phimoe` with another number than two experts
  per token.
- `hunyuan_v1_*`: `alpha` of the scaling is folded into theta on reading; only theta is written.
- `bitnet` with a `quantization_config`: refused. Its linear layers round weights and inputs; ours
  do not round.
- `internlm3` and `iquestcoder` use LLaMA's class in transformers; a run exports as `llama`.

## Unsupported types

The other types that transformers {version} maps to a causal language model:

| missing feature | types |
|---|---|
| none: their files have another model type | `gpt-sw3` (`gpt2`), `llama4` (`llama4_text`), `gemma3` (`gemma3_text`) |
| a factor on the values | `mimo_v2_flash` |
| a softplus gate for each head, a cap on a router's logits | `laguna` |
| experts in attention | `jetmoe` |
| a residual stream weighted layer by layer, a gate with a bias | `beam` |
| shared, nested or repeated layers, the difference of two attentions | `gemma3n*`, `gemma4*`, `diffllama`, `longcat_flash`, `hrm_text` |
| sparse attention that selects its keys, or linear attention | `deepseek_v32`, `deepseek_v4`, `glm_moe_dsa`, `axk2`, `hy_v4`, `dots3_note*`, `minimax`, `minimax_m3_vl_text`, `kimi_linear`, `bailing_hybrid`, `qwen3_next`, `qwen3_5*`, `qwen4_exp*`, `doge` |
| recurrences or convolutions | `mamba`, `mamba2`, `falcon_mamba`, `rwkv`, `xlstm`, `jamba`, `bamba`, `zamba`, `zamba2`, `zaya`, `falcon_h1`, `nemotron_h`, `lfm*`, `granitemoehybrid`, `olmo_hybrid`, `recurrent_gemma`, `inkling*` |
| bytes instead of tokens, hashing, permutations, segments | `blt`, `reformer`, `xlnet`, `xlm`, `cpmant` |

The remaining types have other architectures: encoders run as decoders (`bert` and its relatives),
decoders that attend to an encoder (`bart` and its relatives, `whisper`, `trocr`, …), and models of
images or audio (`emu3`, `fuyu`, `git`, `mllama`, `moshi`, `musicgen`, `phi4_multimodal`, …).
"""  # noqa: E501 a row of a table is a line


@dataclass
class Ratios:
    """Ratios of our bfloat16 errors to transformers', by model type, one per shape."""

    plain: dict[str, list[float]] = field(default_factory=dict)
    native: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, model_type: str, cases: list[dict[str, Any]]) -> list[str]:
        """Measure a model type, and return the last cells of its row."""
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
        """The paragraph below the table."""
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
    """Name of the processor, and its units for bfloat16."""
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
    """One row of the table. Raises an error if a check without a figure fails."""
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
