"""Loads model directories one after the other and says what each did.

    python driver.py SOUND FOLDER …

Each holds `model` and `outside`. Prints a JSON line for each: the line of the refusal (or
null), what else went wrong, what the chat template wrote, seconds of work and seconds passed, bytes
of memory beyond what the imports took, which files outside were opened, and whether code of the
model was executed.
"""

import ctypes
import json
import os
import struct
import sys
import time
import traceback
from pathlib import Path

import workhorse
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import ChatTemplate

IN_ACCESS, IN_OPEN = 0x1, 0x20
EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows


def use(path: Path) -> str:
    """What a user does: load, generate, chat; what the chat template wrote."""
    model = workhorse.load(path, device="cpu", tell=lambda line: None)
    if model.tokenizer is None:
        model.generate([1, 2], max_new_tokens=2)
        return ""
    model.generate("hello", max_new_tokens=2)
    if model.tokenizer.chat_template is None:
        return ""
    chat = ChatTemplate.of(model.tokenizer)
    return chat.render([{"role": "user", "content": "hello"}])


class Watch:
    """Every opening and reading of a folder's files by whatever means, as the kernel sees it."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK)
        if libc.inotify_add_watch(self._queue, os.fsencode(folder), IN_ACCESS | IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def seen(self) -> list[str]:
        """Names of files, each once."""
        names: set[str] = set()
        try:
            raw = os.read(self._queue, 1 << 16)
        except BlockingIOError:
            raw = b""
        os.close(self._queue)
        while raw:
            *_, length = EVENT.unpack_from(raw)
            names.add(raw[EVENT.size : EVENT.size + length].rstrip(b"\0").decode())
            raw = raw[EVENT.size + length :]
        return sorted(names)


def memory(key: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the mark was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def examine(folder: Path, baseline: int) -> dict[str, object]:
    watch = Watch(folder / "outside")
    refused = crashed = None
    wrote = ""
    Path("/proc/self/clear_refs").write_text("5")  # the mark is the present size again
    start, began = time.process_time(), time.perf_counter()
    try:
        wrote = use(folder / "model")
    except WorkhorseError as error:
        refused = str(error)
    except BaseException:
        crashed = traceback.format_exc(limit=-4)
    return {
        "refused": refused,
        "crashed": crashed,
        "wrote": wrote,
        "seconds": time.process_time() - start,
        "passed": time.perf_counter() - began,
        "bytes": memory("VmHWM") - baseline,
        "outside": watch.seen(),
        "executed": (folder / "executed").exists(),
    }


def main() -> None:
    sound, *folders = map(Path, sys.argv[1:])
    use(sound / "model")  # what is imported late is imported now
    baseline = memory("VmRSS")
    for folder in folders:
        print(folder.name, flush=True)  # known even if it never ends
        print(json.dumps(examine(folder, baseline)), flush=True)


if __name__ == "__main__":
    main()
