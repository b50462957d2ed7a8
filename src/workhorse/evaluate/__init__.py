"""Evaluation of a model: loss on documents, and scores on tasks."""

from workhorse.evaluate.evaluation import Evaluation, compressed_bits_per_byte, evaluate
from workhorse.evaluate.tasks import Tasks, load_tasks

__all__ = ["Evaluation", "Tasks", "compressed_bits_per_byte", "evaluate", "load_tasks"]
