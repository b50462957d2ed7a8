"""Description of the machine and the packages of a measurement."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PACKAGES = (
    *("workhorse", "torch", "transformers", "litgpt", "llama-cpp-python", "x-transformers"),
    *("tokenizers", "safetensors"),
)
INSTRUCTIONS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "asimd")
"""The processor features that decide how fast it multiplies."""


def describe(threads: int, device: str) -> dict[str, str]:
    """The processor, cores, vector instructions, system, and the GPU if one is used."""
    model, features = platform.processor() or platform.machine(), ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        pairs = (line.partition(":") for line in lines)
        info = {key.strip(): value.strip() for key, _, value in pairs}
        model = info.get("model name", model)
        features = info.get("flags") or info.get("Features", "")
    known = [name for name in INSTRUCTIONS if name in features.split()]
    described = {
        "processor": model,
        "cores": f"{default_threads()} cores, {threads} threads used",
        "instructions": " ".join(known),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
    if device.startswith("cuda"):
        ask = "import torch; print(torch.cuda.get_device_name())"
        described["gpu"] = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()
    return described


def versions() -> dict[str, str]:
    """Versions of all measured packages that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def default_threads() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
