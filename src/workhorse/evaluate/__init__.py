"""How well a model predicts text."""

from workhorse.evaluate.compression import compressed_bits_per_byte
from workhorse.evaluate.evaluation import Evaluation, evaluate

__all__ = ["Evaluation", "compressed_bits_per_byte", "evaluate"]
