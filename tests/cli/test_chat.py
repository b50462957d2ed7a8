import io
import json
import re
import sys

import pytest

from workhorse import load, save
from workhorse.cli.main import main
from workhorse.cli.output import for_terminal


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
    assert all(reply["tokens_per_second"] > 0 < reply["prompt_seconds"] for reply in replies)
    assert len(replies) == 2
    assert all(0 < reply["tokens"] <= 5 for reply in replies)
    assert err.count("was not trained to chat") == 1
    piped("ab\nc\n")
    out, _ = chat(capsys, str(run_folder), "--seed", "1", "--max-new-tokens", "5")
    assert out == "".join(reply["text"] + "\n" for reply in replies)


def test_the_seed_that_was_drawn_gives_the_same_replies(run_folder, capsys, piped):
    piped("ab\n")
    out, err = chat(capsys, str(run_folder), "--max-new-tokens", "8")
    (seed,) = re.findall(r"^seed (\d+)$", err, re.MULTILINE)
    piped("ab\n")
    assert chat(capsys, str(run_folder), "--max-new-tokens", "8", "--seed", seed)[0] == out


def test_a_draft_guesses_in_a_chat(run_folder, capsys, piped):
    arguments = [str(run_folder), "--temperature", "0", "--max-new-tokens", "5"]
    piped("ab\nc\n")
    plain, _ = chat(capsys, *arguments)
    piped("ab\nc\n")
    assert chat(capsys, *arguments, "--speculate", "2", "--draft", str(run_folder))[0] == plain


def test_a_draft_needs_no_tokenizer(run_folder, capsys, piped, tmp_path):
    save(load(run_folder, execution="reference").decoder, tmp_path / "bare")
    piped("ab\n")
    draft = ["--speculate", "2", "--draft", str(tmp_path / "bare")]
    out, err = chat(capsys, str(run_folder), "--max-new-tokens", "5", *draft)
    assert out
    assert "no tokenizer" not in err


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


@pytest.fixture
def typed(monkeypatch):
    """A terminal on which these lines are typed; an exception in the list is raised in its turn."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def type_lines(*lines: str | BaseException) -> None:
        turns = iter((*lines, EOFError()))

        def answer(_prompt: str = "") -> str:
            turn = next(turns)
            if isinstance(turn, BaseException):
                raise turn
            return turn

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", answer)

    return type_lines


def test_help_tells_the_commands_and_quit_ends(run_folder, capsys, piped):
    piped("/help\n/quit\nnever read\n")
    out, err = chat(capsys, str(run_folder))
    assert out == ""
    assert all(word in err for word in ("/reset", "/help", "/quit", "Ctrl-C"))


def test_an_interrupt_ends_the_reply_and_not_the_chat(run_folder, capsys, typed, monkeypatch):
    from workhorse.generate.runner import Runner

    run, passes = Runner.run, []

    def interrupted(self, *arguments, **named):
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return run(self, *arguments, **named)

    monkeypatch.setattr(Runner, "run", interrupted)
    typed("ab", KeyboardInterrupt(), "c")
    out, err = chat(capsys, str(run_folder), "--seed", "1", "--max-new-tokens", "5", "--json")
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["finish_reason"] == "interrupted"
    assert 0 < first["tokens"] < 5
    assert second["tokens"] == 5
    assert "/quit or Ctrl-D ends the chat" in err


def test_a_message_too_long_does_not_end_a_chat_at_a_terminal(run_folder, capsys, typed):
    typed("x" * 50, "ab")
    out, err = chat(capsys, str(run_folder), "--seed", "1", "--max-new-tokens", "5", "--json")
    assert len(out.splitlines()) == 1
    assert "tokens and the context is 32" in err


def test_what_the_model_no_longer_sees_is_told(run_folder, capsys, piped):
    piped("one\ntwo\n")
    _, err = chat(capsys, str(run_folder), "--seed", "1", "--max-new-tokens", "8")
    assert "the context is full; the model no longer sees the first 2 messages" in err


def test_control_characters_reach_no_terminal(capsys, monkeypatch):
    text = "a\x1b[2Jb\n\tc\x07\x7f\x9b"
    assert for_terminal(text) == text  # through a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert for_terminal(text) == "a␛[2Jb\n\tc␇␡�"
