"""Memory, bandwidth and FLOP/s of devices."""

from functools import cache
from importlib.resources import files

import torch

from workhorse.config.base import Config, ConfigError, parse_yaml
from workhorse.errors import WorkhorseError, nearest

GIGA, TERA = 10**9, 10**12


class DeviceConfig(Config):
    """An accelerator, with the figures of its data sheet."""

    name: str
    memory: float
    """Memory in 10^9 bytes."""
    bandwidth: float
    """Memory bandwidth in 10^9 bytes per second."""
    bfloat16: float | None = None
    """Peak of dense bfloat16 matmuls in 10^12 FLOP/s; None if no rate is published.

    The fields `float16`, `tf32` and `float32` are the peaks of these types.
    """
    float16: float | None = None
    tf32: float | None = None
    float32: float | None = None
    reached: float | None = None
    """Fraction of the peak FLOP/s that matmuls reach in training; None if unknown."""
    source: str

    def peak(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Peak FLOP/s of dense matmuls in a dtype.

        Args:
            dtype: the dtype of the matmuls.
            tf32: True to use the TF32 rate for float32, if the device has one.

        Raises:
            WorkhorseError: no rate is published for this dtype.
        """
        key = str(dtype).removeprefix("torch.")
        rate = self.tf32 if key == "float32" and tf32 and self.tf32 else getattr(self, key, None)
        if rate is None:
            types = [name for name in ("bfloat16", "float32") if getattr(self, name)]
            raise WorkhorseError(
                f"{self.name} has no published matmul rate for {key}; choose train.dtype="
                + " or ".join(types)
            )
        return rate * TERA


@cache
def known_devices() -> dict[str, DeviceConfig]:
    """All known devices by name, as `--device` accepts it."""
    table = parse_yaml(files("workhorse.plan").joinpath("devices.yaml").read_text("utf-8"))
    return {name: DeviceConfig.from_dict(fields) for name, fields in table.items()}


def find_device(name: str) -> DeviceConfig:
    """The known device with this name, ignoring case.

    Raises:
        WorkhorseError: no known device has this name.
    """
    devices, known = known_devices(), name.lower()
    if known not in devices:
        raise ConfigError(f"unknown device {name!r}; {nearest(known, devices)}", "device")
    return devices[known]
