"""Every call into `nn` has the shapes and types of its signature, over the whole grid.

This runs in a separate process: the check must be installed before `nn` is imported, and it would
slow down all other tests.
"""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from jaxtyping import install_import_hook

install_import_hook("workhorse.nn", "beartype.beartype")
from tests.nn.grid import CAUSAL, COVERING, make, random_tokens
from workhorse.nn import HeadLoss, TokenLogprobs, next_token_loss

for config in COVERING:
    decoder, tokens = make(config), random_tokens(config, 2, 6)
    loss, count = next_token_loss(decoder(tokens), tokens, z_loss=1e-4)
    loss.backward()
    decoder(tokens, documents=torch.zeros_like(tokens))
    x = decoder.hidden(tokens, positions=torch.arange(6).expand(2, -1) - 1)
    HeadLoss(100)(x, tokens, decoder.head)
    TokenLogprobs(100, entropy=True)(x, tokens, decoder.head)
    if config in CAUSAL:
        cache = decoder.new_cache(2, 6)
        for piece in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
            decoder(piece, cache=cache)
        cache.truncate([6, 5])

wrong = torch.zeros(2, 6)
try:
    decoder(wrong)
except Exception as error:
    assert "tokens" in str(error), error
else:
    raise AssertionError("the check is not installed: float tokens passed")
print("checked", len(COVERING))
"""


def test_signatures_hold_over_the_grid() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("checked")
