"""The model of the optimizer tests."""

from tests.train.conftest import decoder

__all__ = ["decoder"]
