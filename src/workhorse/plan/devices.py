"""What devices and the links between them offer: memory, bandwidth, FLOPs."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch

from workhorse.config.base import Config, ConfigError, parse_yaml
from workhorse.errors import WorkhorseError, nearest
from workhorse.train.recipe.recipe import TrainConfig

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


BANDWIDTH_REACHED = 0.8
"""The part of their bandwidth that memory and links reach."""
NEAR_LATENCY, FAR_LATENCY = 5e-6, 10e-6
"""Seconds of a message inside a node and between nodes, as libraries send them."""


class Link(NamedTuple):
    """A way from a device to others."""

    bandwidth: float
    """Bytes a second that it sends, while it receives as many."""
    latency: float
    """Seconds of a message."""


class Ring(NamedTuple):
    """Devices that exchange something: so many, each `stride` from the next in their order."""

    size: int
    stride: int


class Cluster(NamedTuple):
    """Devices of one kind and their links: what of each is reached."""

    flops: float
    """Of a device's matrix products, a second."""
    bandwidth: float
    """Of a device's memory, bytes a second."""
    near: Link
    """To the devices of its node."""
    far: Link
    """To all others."""
    node: int
    """How many devices share near links."""
    sends_aside: bool = True
    """Whether a device computes while weights and gradients are on their way."""

    def all_gather(self, ring: Ring, n_bytes: float) -> float:
        """Seconds until all have `n_bytes`, of which each had a part.

        A reduce-scatter takes as long.
        """
        here = max(1, min(ring.size, self.node // ring.stride))
        nodes = -(-ring.size // here)
        near, far = self.near, self.far
        bandwidth = near.bandwidth if nodes == 1 else min(near.bandwidth, here * far.bandwidth)
        hops = near.latency * (here - 1) + far.latency * (nodes - 1)
        return n_bytes * (ring.size - 1) / ring.size / bandwidth + hops

    def all_reduce(self, ring: Ring, n_bytes: float) -> float:
        """Seconds until all have the sum of what each had, `n_bytes`."""
        return 2 * self.all_gather(ring, n_bytes)

    def send(self, stride: int, n_bytes: float) -> float:
        """Seconds until the device that is `stride` further has `n_bytes`."""
        link = self.near if stride < self.node else self.far
        return n_bytes / link.bandwidth + link.latency


def cluster_of(device: DeviceConfig, train: TrainConfig) -> Cluster:
    """Devices whose links are known: what of them is reached in training."""
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
