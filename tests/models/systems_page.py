"""Write `docs/systems.md`, the table of the literature's systems, from the configs of the presets.

python -m tests.models.systems_page [--out docs/systems.md]
"""

import argparse
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from workhorse.cli.main import main as cli
from workhorse.models.systems import find_systems, row

ROOT = Path(__file__).parents[2]
HEADING = """\
# Systems of the literature

```
workhorse models table            # all systems, in the order of their papers
workhorse models table llama-     # those with this text in their name or in the name of a preset
workhorse models table falcon     # one system, with all columns
```

The table has the year, the parameters, the wiring, the norm, the positions and the heads of each
system. The name of one system shows all its columns for all its sizes, and the name of a preset
only for this size:

```
workhorse models table falcon-40b
```

```text
{falcon}
```

`layers`, `d_model` and `heads` are in the order of the presets. `128/8` are 128 heads of queries
and 8 of keys and values. `workhorse models show NAME` prints the design of any other model.
`--json` prints the table as data.

The tables below have all columns. `make reference` writes this page. Wiring, norm, positions,
heads, counts, vocabulary and context come from the configs of the [presets](models.md). The other
columns are facts of the papers, in `literature.yaml` of `workhorse.models`.

## Design

- **Wiring.** Pre-norm: `x + f(norm(x))` for each sub-layer. Post-norm: `norm(x + f(x))`. Reordered
  norm: `x + norm(f(x))`. Sandwich norm: `x + norm(f(norm(x)))`. Parallel: attention and
  feed-forward have the same input, with one norm or two. All except post-norm models also have a
  norm before the head.
- **Positions.** Sinusoidal and learned positions are added to the embedding. RoPE rotates queries
  and keys. ALiBi adds a bias to the attention scores.
- **Heads.** MHA: multi-head attention. GQA: grouped-query attention, here with 8 key-value heads
  for 64 query heads: (8 for 64). MQA: multi-query attention, with one key-value head. MLA: latent
  attention.
- A **range** of numbers covers the sizes of a system. If the words differ between sizes, the sizes
  come before a colon. A dash means that the fact was not found in the source. The shapes of GPT-4
  and Gemini are not published.

"""
TABLES: dict[str, dict[str, str]] = {
    "": {
        "system": "name",
        "year": "year",
        "parameters": "parameters",
        "wiring": "wiring",
        "norm": "norm",
        "positions": "positions",
        "heads": "attention",
        "context": "context",
    },
    """
## Sizes

**Layers**, **width** (`d_model`) and **heads** are in the order of the presets, or one number for
all. **Heads**: 128/8 are 128 heads of queries and 8 of keys and values, in the first layer.
**Vocabulary**: rows of the embedding, with padding.

""": {
        "system": "name",
        "presets": "presets",
        "layers": "layers",
        "width": "d_model",
        "heads": "heads",
        "vocabulary": "vocabulary",
    },
    """
## Parts

- **Scores**: changes of queries, keys and attention scores. **Window**: the keys that a query sees.
- **Feed-forward**: the activation (GELU, ReLU, SwiGLU, GeGLU); of a mixture, the experts per token.
- **Head**: tied to the embedding or not.
- **Initialisation**: as the source gives it. A preset starts with its `init`, see `models show`.

""": {
        "system": "name",
        "feed-forward": "feed_forward",
        "biases": "biases",
        "scores": "scores",
        "window": "reach",
        "head": "head",
        "tokenizer": "tokenizer",
        "initialisation": "init",
    },
    """
## Papers

**Printed**: the parameter counts in the source; [models.md](models.md#the-table) has all sizes with
both counts. **Differs**: an earlier system, and the differences from it. **Gaps**: facts that the
source lacks or contradicts.

""": {
        "system": "name",
        "paper": "paper",
        "printed": "printed",
        "differs from": "differs",
        "gaps": "gaps",
    },
}
MAY_BE_NONE = ("biases", "scores", "reach")
"""Columns in which an empty value of a preset means that the model has none."""


def page() -> str:
    """Return the page in Markdown."""
    rows = [row(system) for system in find_systems()]
    with redirect_stdout(io.StringIO()) as falcon:
        cli(["models", "table", "falcon-40b"])
    parts = [HEADING.format(falcon=falcon.getvalue().rstrip())]
    for introduction, columns in TABLES.items():
        parts += [introduction, _line(columns), _line("---" for _ in columns)]
        parts += [_line(_cell(found, key) for key in columns.values()) for found in rows]
    return "".join(parts)


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(found: dict[str, Any], key: str) -> str:
    value = found.get(key) or ("none" if key in MAY_BE_NONE and found["presets"] else "—")
    if key == "presets" and found[key]:
        return ", ".join(f"`{name}`" for name in value)
    if key == "paper" and "arxiv" in found:
        return f"{value}, [{found['arxiv']}](https://arxiv.org/abs/{found['arxiv']})"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "systems.md")
    parser.parse_args().out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
