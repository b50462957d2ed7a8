"""Campaign: learn the format of tool calls from a folder of chat templates, and read it back.

    make campaign-templates TEMPLATES=path/to/models/templates

The folder has files `*.jinja`, as llama.cpp's sources do. Arguments of a format without nested
values are strings and numbers only, as in `ARGUMENTS` of tests/tokenizers/test_replies.py.
"""

import os
import random
from pathlib import Path

import pytest

from tests.tokenizers.test_replies import ARGUMENTS, NAMES, in_pieces, learned, read, written
from workhorse.tokenizers import ChatTemplate
from workhorse.tokenizers.chat.reply_format import HARMONY

pytestmark = pytest.mark.campaign
FOLDER = os.environ.get("TEMPLATES")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
OTHERS = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "it reads keys that the schemas of the test lack",
    "NVIDIA-Nemotron-Nano-v2": "the content of a reply is a turn of its own",
    "google-gemma-4-31B-it": "the content of a reply follows its calls",
    "google-gemma-4-31B-it-interleaved": "the content of a reply follows its calls",
    "openbmb-MiniCPM5-1B": "strings with several lines have further marks",
}
"""Templates whose replies the test cannot write or read, and the reason."""


@pytest.mark.skipif(not FILES, reason="needs a folder with templates in TEMPLATES")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_template(path: Path) -> None:
    template = ChatTemplate(path.read_text(), names={"bos_token": "<s>", "eos_token": "</s>"})
    format = learned(template)
    if format.calls is None or format.calls is HARMONY.calls:
        pytest.skip("it writes no tools and calls" if format.calls is None else "built in")
    if path.stem in OTHERS:
        pytest.skip(OTHERS[path.stem])
    choose = random.Random(0)
    for _ in range(20):
        count = choose.randint(1, 3) if format.calls.between else 1
        calls = [(choose.choice(NAMES), choose.choice(ARGUMENTS)) for _ in range(count)]
        content = choose.choice(["", "Let me see: 1 < 2."])
        reply = written(template, format, content, calls)
        thought = ""
        if format.reasoning is not None and format.begins_in_reasoning:
            thought = "I <think> so."
            reply = f"{thought}\n{format.reasoning[1]}\n\n{reply}"
        text, reasoning, found = read(format, in_pieces(reply, choose))
        assert (reasoning, found) == (thought, calls)
        assert text.strip() in ("", content)  # some templates omit the content
