"""Write `docs/families.md`: every model type measured beside transformers.

python -m tests.parity.table [--out docs/families.md] [TYPE ...]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.parity import reference
from tests.parity.all_cases import ALL
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
- **generations**: greedy and with 3 beams, 8 tokens of 3 prompts, the same tokens as `generate`.
- **back**: written again by us, every tensor has the same name, shape and bytes,
  `AutoModelForCausalLM` loads it with nothing missing or unexpected, and its logits differ by this.

| model type | class | shapes | logits | cached | ragged | generations | back |
|---|---|---|---|---|---|---|---|
"""


NOTES = """
 PaLM was never released: `tests/models/test_unreleased.py` holds it to a forward pass written
from its paper's equations, to 1e-5. The text parts of `gemma3`, `llama4` and `mistral3` are read
out of the multimodal models (`tests/parity/test_multimodal.py`).

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
- `internlm3` and `iquestcoder` are LLaMA's class in transformers; a run exports as `llama`.

## Not there

- `bitnet`: a norm inside attention and feed-forward, before the last projection of each.
- `cohere2_moe`: the mean of the routed and the shared output.
- Models that mix attention with recurrences or convolutions (`jamba`, `bamba`, `zamba2`,
  `falcon_h1`, `nemotron_h`, `lfm2`, `minimax`, `qwen3_next`, `granitemoehybrid`,
  `recurrent_gemma`), sparse or linear attention (`deepseek_v32`, `glm_moe_dsa`), shared or nested
  layers (`gemma3n`, `diffllama`, `longcat_flash`): other architectures than this decoder.
"""


def row(model_type: str, cases: list[dict[str, Any]]) -> str:
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
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Measure the given types, or all, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    types = arguments.types or list(MODEL_TYPES)
    text = HEADING.format(version=transformers.__version__, torch=torch.__version__.split("+")[0])
    for model_type in types:
        line = row(model_type, ALL[model_type])
        print(line, end="", flush=True)
        text += line
    text += f"\n{len(types)} model types.\n" + NOTES
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
