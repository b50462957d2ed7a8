"""Campaign: LangChain and `llm` work with the server as docs/serving.md shows.

python3 -m venv clients; clients/bin/pip install langchain-openai llm
make campaign-clients CLIENTS=clients/bin
"""

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import KEY, MODEL, serving, write_chat_run

CLIENTS = os.environ.get("CLIENTS", "")
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not CLIENTS, reason="needs CLIENTS, a folder with programs"),
]
PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(write_chat_run(tmp_path_factory.mktemp("clients") / MODEL)) as url:
        yield url


def shown(beginning: str, url: str) -> str:
    """Return the block of the page with this beginning, for the running server."""
    (block,) = re.findall(rf"^```\w*\n({re.escape(beginning)}.*?)^```", PAGE, re.M | re.S)
    changes = {"http://127.0.0.1:8000/v1": url, "stdlib-preferences": MODEL, '"none"': f'"{KEY}"'}
    for old, new in changes.items():
        block = block.replace(old, new)
    return block


def run(program: str, *arguments: str, **more: str) -> str:
    command = [str(Path(CLIENTS).absolute() / program), *arguments]
    environment = {**os.environ, **more}
    return subprocess.run(
        command, check=True, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout


def test_langchain(url):
    code = shown("from langchain_openai", url)
    chat, streamed, person, completion = run("python", "-c", code).splitlines()
    assert all(isinstance(ast.literal_eval(text), str) for text in (chat, completion))
    assert ast.literal_eval(streamed)
    assert re.fullmatch(r"Person\(name=.*, age=-?\d+\)", person)


def test_llm(url, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(shown("# extra-openai-models.yaml", url))
    (tmp_path / "keys.json").write_text(json.dumps({"workhorse": KEY}))
    for line in shown("llm -m", url).splitlines():
        answer = run(*shlex.split(line), LLM_USER_PATH=str(tmp_path))
        assert answer  # a reply of the small model may be an empty line
        if "--schema" in line:
            assert json.loads(answer).keys() >= {"name", "age"}
