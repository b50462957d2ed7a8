"""Estimate the memory, arithmetic, time and cost of a model and its training."""

from workhorse.plan.devices import known_devices
from workhorse.plan.plan import plan

__all__ = ["known_devices", "plan"]
