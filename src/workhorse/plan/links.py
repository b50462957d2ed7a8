"""Devices and the links between them: how long they take to exchange something by rings."""

from typing import NamedTuple

import torch

from workhorse.plan.devices import GIGA, DeviceConfig
from workhorse.train.recipe.recipe import TrainConfig

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


class Machine(NamedTuple):
    """What of a device and its links is reached."""

    flops: float
    """Of matrix products, a second."""
    bandwidth: float
    """Of its memory, bytes a second."""
    near: Link
    """To the devices of its node."""
    far: Link
    """To all others."""
    node: int
    """How many devices share near links."""
    sends_aside: bool = True
    """Whether it computes while weights and gradients are on their way."""


class Group(NamedTuple):
    """Devices that exchange something: so many, each `stride` from the next in their order."""

    size: int
    stride: int


class Collectives:
    """Seconds of what groups of devices exchange by rings."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def gather(self, group: Group, n_bytes: float) -> float:
        """All get so many bytes, of which each has a part; also to add up and keep a part."""
        here = max(1, min(group.size, self.machine.node // group.stride))
        nodes = -(-group.size // here)
        near, far = self.machine.near, self.machine.far
        bandwidth = near.bandwidth if nodes == 1 else min(near.bandwidth, here * far.bandwidth)
        hops = near.latency * (here - 1) + far.latency * (nodes - 1)
        return n_bytes * (group.size - 1) / group.size / bandwidth + hops

    def add(self, group: Group, n_bytes: float) -> float:
        """All get the sum of so many bytes."""
        return 2 * self.gather(group, n_bytes)

    def send(self, stride: int, n_bytes: float) -> float:
        """One device sends another so many bytes."""
        link = self.machine.near if stride < self.machine.node else self.machine.far
        return n_bytes / link.bandwidth + link.latency


def machine_of(device: DeviceConfig, train: TrainConfig) -> Machine:
    """What of a device whose links are known is reached in training."""
    links = device.links
    assert links is not None
    peak = device.peak(getattr(torch, train.dtype), tf32=train.matmul_precision == "high")
    reached = BANDWIDTH_REACHED * GIGA
    return Machine(
        flops=links.reached * peak,
        bandwidth=reached * device.bandwidth,
        near=Link(reached * links.node, NEAR_LATENCY),
        far=Link(reached * links.network, FAR_LATENCY),
        node=links.devices,
    )
