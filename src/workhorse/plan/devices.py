"""What a device has: memory, bandwidth, and the rate of its matrix products."""

from functools import cache
from importlib.resources import files

import torch

from workhorse.config.base import Config, ConfigError, parse_yaml
from workhorse.errors import WorkhorseError, nearest

GIGA, TERA = 10**9, 10**12


class LinksConfig(Config):
    """What a device and its ways to others reach in training."""

    node: float
    """What it sends at once to others of its node, 10^9 bytes a second."""
    network: float
    """The same to those of other nodes."""
    devices: int = 8
    """Of a node."""
    reached: float
    """The part of its peak that matrix products reach."""


class DeviceConfig(Config):
    """An accelerator as its maker describes it."""

    name: str
    memory: float
    """10^9 bytes."""
    bandwidth: float
    """Of that memory, 10^9 bytes a second."""
    bfloat16: float | None = None
    """10^12 floating-point operations a second, as all below."""
    float16: float | None = None
    tf32: float | None = None
    float32: float | None = None
    links: LinksConfig | None = None
    """How it exchanges with others; None: not known."""
    source: str

    def peak(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Floating-point operations a second of dense matrix products.

        Raises:
            WorkhorseError: it cannot multiply this type.
        """
        key = str(dtype).removeprefix("torch.")
        rate = self.tf32 if key == "float32" and tf32 and self.tf32 else getattr(self, key, None)
        if rate is None:
            types = [name for name in ("bfloat16", "float32") if getattr(self, name)]
            raise WorkhorseError(
                f"{self.name} has no matrix products in {key}; choose train.dtype="
                + " or ".join(types)
            )
        return rate * TERA


@cache
def known_devices() -> dict[str, DeviceConfig]:
    """Every device of the table, by the name that is given for it."""
    table = parse_yaml(files("workhorse.plan").joinpath("devices.yaml").read_text("utf-8"))
    return {name: DeviceConfig.from_dict(fields) for name, fields in table.items()}


def find_device(name: str) -> DeviceConfig:
    """The device of that name.

    Raises:
        WorkhorseError: there is none.
    """
    devices, known = known_devices(), name.lower()
    if known not in devices:
        raise ConfigError(f"no device {name!r}; {nearest(known, devices)}", "device")
    return devices[known]
