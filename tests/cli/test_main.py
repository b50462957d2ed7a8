"""The command itself: startup, errors, and exit codes."""

import errno
import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import workhorse
from workhorse.cli.loading import json_option, runtime_options
from workhorse.cli.main import VERBS, as_text, command, main
from workhorse.cli.output import ExitCode, print_result, progress
from workhorse.errors import WorkhorseError

PYTHON = [sys.executable, "-W", "error"]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Install a verb `probe` that calls the given function."""

    def install(action: Callable[[], object]) -> None:
        @click.command("probe")
        @click.option("--count", type=int)
        @runtime_options
        @json_option
        def command(**_: object) -> None:
            action()

        module = types.ModuleType("workhorse.cli.verbs.probe")
        module.__dict__["command"] = command
        monkeypatch.setitem(sys.modules, "workhorse.cli.verbs.probe", module)
        monkeypatch.setitem(VERBS, "probe", "Do one thing.")

    return install


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.strip()


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_neither_torch_nor_numpy(verb: str) -> None:
    code = f"""
import sys
from workhorse.cli.main import main
assert main({[verb, "--help"] if verb else ["--help"]}) == 0
slow = {{"torch", "numpy", "pydantic", "transformers", "tokenizers"}} & set(sys.modules)
assert not slow, slow
"""
    done = subprocess.run([*PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"workhorse {verb}".strip() in done.stdout


def test_help_lists_every_verb_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    for verb, line in VERBS.items():
        assert verb in shown
        assert line in shown


def test_python_m_workhorse_is_the_command() -> None:
    done = subprocess.run(
        [*PYTHON, "-m", "workhorse", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"workhorse {workhorse.__version__}\n")


def test_no_verb_shows_the_help_as_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert "Verbs:" in err


def test_unknown_verb_names_the_nearest(probe: Callable, capsys: pytest.CaptureFixture) -> None:
    probe(raising(AssertionError("must not run")))
    assert main(["prob"]) == ExitCode.USAGE
    assert "unknown verb 'prob'; did you mean 'probe'?" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--colour"], "--colour"),
        (["probe", "--cuont", "3"], "--count"),
        (["probe", "--count", "three"], "'three'"),
        (["probe", "--dtype", "int3"], "bfloat16"),
        (["probe", "--threads", "-1"], "-1"),
        (["probe", "stray"], "stray"),
        (["probe", "--count"], "'--count' requires an argument (see workhorse probe --help)"),
        (["train", ""], "a path is empty; write . for the current folder"),
        (["data", "prepare", "r.yaml", "--out", ""], "a path is empty"),
    ],
)
def test_wrong_usage_is_one_line(
    probe: Callable, capsys: pytest.CaptureFixture, arguments: list[str], said: str
) -> None:
    probe(raising(AssertionError("must not run")))
    assert main(arguments) == ExitCode.USAGE
    line = one_line(capsys)
    assert line.startswith("workhorse")
    assert said in line
    assert "--help)" in line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkhorseError("top_p=2 is not a probability"), "top_p=2 is not a probability"),
        (WorkhorseError("two\n  lines"), "two lines"),
        (click.FileError("a.txt", "unreadable"), "unreadable"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt"), "a.txt: No such"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs"), "/runs: Permission denied"),
        (InterruptedError(errno.EINTR, "Interrupted system call", "/a"), "/a: Interrupted system"),
        (OSError(errno.ENOLCK, "No locks available"), "No locks available"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (UnicodeError("no BOM"), "the input cannot be read: no BOM; set PYTHONIOENCODING=utf-8"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_2(
    probe: Callable, capsys: pytest.CaptureFixture, error: Exception, said: str
) -> None:
    probe(raising(error))
    assert main(["probe"]) == ExitCode.USAGE
    assert said in one_line(capsys)


def test_a_current_folder_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["models", "list"]) == ExitCode.USAGE
    assert one_line(capsys).endswith("the current folder does not exist; change to another")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError(errno.EBADF, "Bad file descriptor")]
)
def test_a_failure_of_ours_shows_its_traceback(
    probe: Callable, capsys: pytest.CaptureFixture, error: Exception
) -> None:
    probe(raising(error))
    assert main(["probe"]) == ExitCode.FAILURE
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_exits_130_without_traceback(
    probe: Callable, capsys: pytest.CaptureFixture
) -> None:
    probe(raising(KeyboardInterrupt()))
    assert main(["probe"]) == ExitCode.INTERRUPTED
    assert one_line(capsys) == "workhorse: interrupted"


def test_a_verb_chooses_its_exit_code(probe: Callable) -> None:
    probe(lambda: click.get_current_context().exit(ExitCode.STOPPED))
    assert main(["probe"]) == ExitCode.STOPPED


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = "from workhorse.cli.main import main; import sys; sys.exit(main(['--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [*PYTHON, "-c", code], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_json_is_one_line_that_json_can_say(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"loss": math.inf, "path": Path("a") / "b", "sizes": (1, 2.5), "text": "é\n"}
    print_result(result, as_json=True, text="unused")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"loss": None, "path": "a/b", "sizes": [1, 2.5], "text": "é\n"}


def test_progress_without_a_terminal_is_lines_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workhorse.cli.output.PLAIN_INTERVAL", 0.0)
    with progress("reading", unit="bytes") as report:
        report(1_000, 4_000)
        report(2_000, None)
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("reading: 1,000 of 4,000 (25%) bytes")
    assert second.startswith("reading: 2,000 bytes")


def test_progress_on_a_terminal_is_a_bar_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("reading") as report:
        report(1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "50%" in err


@pytest.mark.parametrize("verb", ["generate", "chat", "evaluate"])
def test_help_tells_every_kind_of_model(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for kind in ("run directory", "Hugging Face directory or hub id", "GGUF file", "preset"):
        assert kind in told


def test_generates_flags_have_the_names_of_the_options() -> None:
    from workhorse.cli.verbs.generate import command
    from workhorse.generate import GenerationConfig

    flags = {name for option in command.params for name in option.opts}
    elsewhere = {"stop_tokens", "shown_tokens"}  # --ignore-eos; of no use here
    for name in set(GenerationConfig.model_fields) - elsewhere:
        assert f"--{name.replace('_', '-')}" in flags


def test_an_error_is_short_and_obeyed_by_no_terminal(
    probe: Callable, capsys: pytest.CaptureFixture
) -> None:
    probe(raising(WorkhorseError(f"\x1b[31m\u202e{'x' * 9000}; choose another")))
    assert main(["probe"]) == ExitCode.USAGE
    line = one_line(capsys)
    assert line.startswith("workhorse: \\x1b[31m\\u202exxx")
    assert line.endswith("; choose another")
    assert len(line) < 700


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")],
)
def test_want_of_memory_is_one_line(
    probe: Callable, capsys: pytest.CaptureFixture, error: Exception
) -> None:
    probe(raising(error))
    assert main(["probe"]) == ExitCode.USAGE
    assert "not enough memory" in one_line(capsys)


EARLY = """
import signal, sys
from workhorse.__main__ import run
class Interrupts:
    def find_spec(self, name, *_):
        if name.startswith("workhorse.cli"):
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
run()
"""


def test_an_interrupt_during_the_first_imports_is_silent() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, b"", b"")


NO_STREAM = """
import os, sys
from workhorse.cli.main import run
sys.argv = ["workhorse", "nonsense"]
try:
    run()
finally:
    assert os.open("/", os.O_RDONLY) > 2
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_and_full_streams(streams: str) -> None:
    """The next opened file never gets the descriptor of a standard stream."""
    command = f'exec "$0" -c "$1" {streams}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, NO_STREAM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert ("unknown verb" in done.stderr) == ("2>" not in streams)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_under_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PYTHON, "-m", "workhorse", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "workhorse: No space left on device\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_escaped(encoding: str) -> None:
    code = """
from workhorse.cli.output import print_result, settle_streams
settle_streams()
print_result({"text": "\\xe9\\u20ac\\U0001f600"}, True, "")
print_result({}, False, "\\u20ac")
"""
    done = subprocess.run(
        [*PYTHON, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=True,
    )
    as_json, text = done.stdout.decode("ascii").splitlines()
    assert json.loads(as_json) == {"text": "\xe9\u20ac\U0001f600"}
    assert text == r"\u20ac"


def test_arguments_are_utf_8_whatever_the_locale(
    probe: Callable, capsys: pytest.CaptureFixture
) -> None:
    probe(raising(AssertionError("must not run")))
    assert main(["probe", "a\udcff"]) == ExitCode.USAGE
    assert r"'a\udcff' is not UTF-8" in one_line(capsys)
    assert as_text(["é", os.fsdecode("é".encode())]) == ["é", "é"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid"), "not utf-8: bad byte at offset 1"),
        (
            UnicodeEncodeError("ascii", "é", 0, 1, "range"),
            "encoding ascii cannot express the file name; set PYTHON",
        ),
    ],
)
def test_other_encodings_are_told(
    probe: Callable, capsys: pytest.CaptureFixture, error: Exception, said: str
) -> None:
    probe(raising(error))
    assert main(["probe"]) == ExitCode.USAGE
    assert said in one_line(capsys)


@pytest.mark.parametrize("verb", VERBS)
def test_numbers_are_of_ascii_digits(verb: str) -> None:
    def numbers(of: click.Command) -> Iterator[click.Parameter]:
        for one in getattr(of, "commands", {}).values():
            yield from numbers(one)
        yield from (one for one in of.params if one.type.name.startswith(("integer", "float")))

    found = command.get_command(click.Context(command), verb)
    assert found is not None
    for parameter in numbers(found):
        assert parameter.type.convert("1", parameter, None) == 1
        for text in ("1\u0662", "1_0"):
            with pytest.raises(click.BadParameter, match=r"is not a valid (integer|float)"):
                parameter.type.convert(text, parameter, None)
