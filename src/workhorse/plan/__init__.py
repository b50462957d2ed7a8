"""Estimate the memory, arithmetic, time and cost of a model and its training."""

from workhorse.plan.devices import known_devices
from workhorse.plan.plan import plan, plan_devices

__all__ = ["known_devices", "plan", "plan_devices"]
