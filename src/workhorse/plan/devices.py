"""Memory, bandwidth and FLOP/s of devices, and the speed of the links between them."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch

from workhorse.config.base import Config, ConfigError, parse_yaml
from workhorse.errors import WorkhorseError, nearest
from workhorse.train.recipe.training import TrainConfig

GIGA, TERA = 10**9, 10**12


class LinksConfig(Config):
    """A device's links to other devices, and the fraction of its peak that training reaches."""

    node: float
    """Bandwidth of the link to devices of the same node, in 10^9 bytes per second and direction."""
    network: float
    """Bandwidth of the link to devices of other nodes, in 10^9 bytes per second and direction."""
    devices: int = 8
    """Number of devices per node."""
    reached: float
    """Fraction of the device's peak FLOP/s that matmuls reach in training."""


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
    links: LinksConfig | None = None
    """Links to other devices; None if unknown."""
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


BANDWIDTH_REACHED = 0.8
"""Fraction of their peak bandwidth that memory and links reach."""
NEAR_LATENCY, FAR_LATENCY = 5e-6, 10e-6
"""Latency in seconds of a message inside a node and between nodes, including software overhead."""


class Link(NamedTuple):
    """A link from a device to other devices."""

    bandwidth: float
    """Bytes per second in each direction; both directions can be used at the same time."""
    latency: float
    """Seconds per message."""


class Ring(NamedTuple):
    """A group of `size` devices that communicate; neighbours' ranks differ by `stride`."""

    size: int
    stride: int


class Cluster(NamedTuple):
    """Devices of one type and their links, with the speeds that training reaches."""

    flops: float
    """FLOP/s of each device in matmuls."""
    bandwidth: float
    """Memory bandwidth of each device in bytes per second."""
    near: Link
    """Link to devices of the same node."""
    far: Link
    """Link to devices of other nodes."""
    node: int
    """Number of devices per node."""
    sends_aside: bool = True
    """True if transfers of weights and gradients overlap with computation."""

    def all_gather(self, ring: Ring, n_bytes: float) -> float:
        """Seconds of an all-gather in a group of devices, with a result of `n_bytes` on each.

        A reduce-scatter of `n_bytes` takes the same time.
        """
        here = max(1, min(ring.size, self.node // ring.stride))
        nodes = -(-ring.size // here)
        near, far = self.near, self.far
        bandwidth = near.bandwidth if nodes == 1 else min(near.bandwidth, here * far.bandwidth)
        hops = near.latency * (here - 1) + far.latency * (nodes - 1)
        return n_bytes * (ring.size - 1) / ring.size / bandwidth + hops

    def all_reduce(self, ring: Ring, n_bytes: float) -> float:
        """Seconds of an all-reduce of `n_bytes` in a group of devices."""
        return 2 * self.all_gather(ring, n_bytes)

    def send(self, stride: int, n_bytes: float) -> float:
        """Seconds to send `n_bytes` to the device whose rank is higher by `stride`."""
        link = self.near if stride < self.node else self.far
        return n_bytes / link.bandwidth + link.latency


def cluster_of(device: DeviceConfig, train: TrainConfig) -> Cluster:
    """A cluster of devices of one type, with the speeds that training reaches.

    The links of the device must be known.
    """
    links = device.links
    assert links is not None
    peak = device.peak(getattr(torch, train.dtype), tf32=train.matmul_precision == "high")
    reached = BANDWIDTH_REACHED * GIGA
    return Cluster(
        flops=links.reached * peak,
        bandwidth=reached * device.bandwidth,
        near=Link(reached * links.node, NEAR_LATENCY),
        far=Link(reached * links.network, FAR_LATENCY),
        node=links.devices,
    )
