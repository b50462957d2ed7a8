"""Loads model directories one after the other and reports the effects of each.

    python driver.py SOUND FOLDER …

Each folder contains `model` and `outside`. Prints a JSON line for each: the error message or null,
the traceback of any other exception, the output of the chat template, CPU seconds and elapsed
seconds, bytes of memory in addition to the imports, the files outside that were opened, and whether
code of the model was run.
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
    """Load, generate and chat as a user does, and return the output of the chat template."""
    model = workhorse.load(path, device="cpu", notify=lambda line: None)
    if model.tokenizer is None:
        model.generate([1, 2], max_new_tokens=2)
        return ""
    model.generate("hello", max_new_tokens=2)
    if model.tokenizer.chat_template is None:
        return ""
    chat = ChatTemplate.of(model.tokenizer)
    return chat.render([{"role": "user", "content": "hello"}])


class Watch:
    """Records every open and read of a folder's files, as reported by the kernel (inotify)."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK)
        if libc.inotify_add_watch(self._queue, os.fsencode(folder), IN_ACCESS | IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def seen(self) -> list[str]:
        """Names of the files that were opened or read."""
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
    """Memory of this process in bytes: `VmRSS` is current, `VmHWM` the peak since its reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def examine(folder: Path, baseline: int) -> dict[str, object]:
    watch = Watch(folder / "outside")
    refused = crashed = None
    wrote = ""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current size
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
    use(sound / "model")  # triggers late imports
    baseline = memory("VmRSS")
    for folder in folders:
        print(folder.name, flush=True)  # printed first, in case it never ends
        print(json.dumps(examine(folder, baseline)), flush=True)


if __name__ == "__main__":
    main()
