"""Llama 2: Open Foundation and Fine-Tuned Chat Models (Touvron et al., 2307.09288)."""

from functools import partial

from workhorse.models.families.llama import llama
from workhorse.models.preset import Preset

llama2 = partial(llama, eps=1e-5, max_seq_len=4096)
"""LLaMA with twice the context, and grouped-query attention at 34B and 70B."""

SOURCE = "2307.09288 Table 1; the released config.json"

PRESETS = (
    Preset(
        "llama-2-7b",
        partial(llama2, d_model=4096, n_layers=32, n_heads=32, d_ff=11008),
        parameters=6_738_415_616,
        exactness="released",
        printed="7B",
        source=SOURCE,
        notes=("Early conversions have eps 1e-6; the authors corrected it to 1e-5.",),
    ),
    Preset(
        "llama-2-13b",
        partial(llama2, d_model=5120, n_layers=40, n_heads=40, d_ff=13824),
        parameters=13_015_864_320,
        exactness="released",
        printed="13B",
        source=SOURCE,
    ),
    Preset(
        "llama-2-34b",
        partial(llama2, d_model=8192, n_layers=48, n_heads=64, n_kv_heads=8, d_ff=22016),
        parameters=33_743_970_304,
        exactness="derived",
        printed="34B",
        source="2307.09288 Table 1; the config.json of Code Llama 34B (2308.12950)",
        notes=(
            "Never released. The shape is taken from Code Llama 34B, which continued its training; "
            "RoPE theta (10,000) and context are Llama 2's.",
        ),
    ),
    Preset(
        "llama-2-70b",
        partial(llama2, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, d_ff=28672),
        parameters=68_976_648_192,
        exactness="released",
        printed="70B",
        source=SOURCE,
        notes=("Printed as 70B; the released model has 68.98B.",),
    ),
)
