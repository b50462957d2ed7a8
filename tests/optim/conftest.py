"""The model that the tests of training use."""

from tests.train.conftest import decoder

__all__ = ["decoder"]
