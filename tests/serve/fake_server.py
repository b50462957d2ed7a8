"""Runs the server with the engine of `fake_engine.py`: `python fake_server.py KEY=VALUE …`.

The settings are those of `EngineSettings` and `Limits`, and `key`: API keys, separated by commas.
"""

import asyncio
import sys
from pathlib import Path

from workhorse.serve.gate import Limits
from workhorse.serve.run import listen, serve
from workhorse.serve.settings import EngineSettings

if __name__ == "__main__":
    given = dict(one.split("=", 1) for one in sys.argv[1:])
    numbers = {
        name: float(text) if "seconds" in name else int(text)
        for name, text in given.items()
        if name != "key"
    }
    limits = {name: value for name, value in numbers.items() if name in Limits.__annotations__}
    engine = {
        name: value for name, value in numbers.items() if name in EngineSettings.__annotations__
    }
    bound = listen("127.0.0.1", 0)
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    number = asyncio.run(
        serve(
            EngineSettings("fake", **engine),
            bound,
            name="fake",
            keys=given["key"].split(",") if "key" in given else [],
            limits=Limits(**limits),
            loopback=True,
            say=lambda line: print(line, file=sys.stderr, flush=True),
            on_ready=lambda facts: print(address, flush=True),
            command=(sys.executable, str(Path(__file__).parent / "fake_engine.py")),
        )
    )
    sys.exit(128 + number)
