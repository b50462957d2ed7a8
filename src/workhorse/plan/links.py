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
