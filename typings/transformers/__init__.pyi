# For the type checker, which would read a thousand files for the few names that benchmarks use.
from typing import Any

def __getattr__(name: str) -> Any: ...
