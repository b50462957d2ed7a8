"""The scale of a float16 loss."""

from typing import Any

GROWTH_STEPS = 2000
"""Finite steps after which the float16 loss scale doubles, as in `torch.amp.GradScaler`."""
FIRST_SCALE = 2.0**16


class LossScale:
    """Multiplies the loss so that float16 gradients do not vanish (1710.03740 §3.2)."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = FIRST_SCALE if enabled else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after many steps without one."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state; one saved in training without this scaling is ignored."""
        if state.get("enabled", self.enabled) == self.enabled:
            self.value, self.good_steps = state["value"], state["good_steps"]
