"""What a model and its training need, before either is allocated."""

from workhorse.plan.devices import known_devices
from workhorse.plan.plan import plan

__all__ = ["known_devices", "plan"]
