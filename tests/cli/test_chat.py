import io
import json
import sys

import pytest

from workhorse.cli.main import main


@pytest.fixture
def piped(monkeypatch):
    def pipe(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    return pipe


def chat(capsys, *arguments: str) -> tuple[str, str]:
    assert main(["chat", *arguments]) == 0
    return capsys.readouterr()


def test_each_line_gets_a_reply(run_folder, capsys, piped):
    piped("ab\n\nc\n/exit\nnever read\n")
    out, err = chat(capsys, str(run_folder), "--seed", "1", "--max-new-tokens", "5", "--json")
    replies = [json.loads(line) for line in out.splitlines()]
    assert len(replies) == 2
    assert all(0 < reply["tokens"] <= 5 for reply in replies)
    assert err.count("was never trained to chat") == err.count("\n") == 1
    piped("ab\nc\n")
    out, _ = chat(capsys, str(run_folder), "--seed", "1", "--max-new-tokens", "5")
    assert out == "".join(reply["text"] + "\n" for reply in replies)


def test_a_draft_guesses_in_a_chat(run_folder, capsys, piped):
    arguments = [str(run_folder), "--temperature", "0", "--max-new-tokens", "5"]
    piped("ab\nc\n")
    plain, _ = chat(capsys, *arguments)
    piped("ab\nc\n")
    assert chat(capsys, *arguments, "--speculate", "2", "--draft", str(run_folder))[0] == plain


def test_reset_begins_anew(run_folder, capsys, piped):
    piped("ab\n/reset\nab\n")
    out, _ = chat(capsys, str(run_folder), "--seed", "1", "--max-new-tokens", "5", "--json")
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["text"] == second["text"]


def test_a_message_that_does_not_fit_is_one_line(run_folder, capsys, piped):
    piped("x" * 50 + "\n")
    assert main(["chat", str(run_folder)]) == 2
    _, err = capsys.readouterr()
    assert "tokens and the context is 32" in err.splitlines()[-1]
