"""Print the bytes that a training step adds to a process: `python -m tests.plan.resident < JSON`.

The JSON has `config` (of a decoder) and `train`. The figure is the peak of resident memory over two
steps, minus the resident memory before the model is built. A tiny model is trained first to load
libraries and start threads, and its freed memory is returned to the system. The measurement needs a
separate process, because it covers the whole process.
"""

import json
import sys

import torch

from tests.plan.measure import CPU, make_step, random_batch
from workhorse.devices.memory import most_resident, resident
from workhorse.native.allocator import give_back_freed_memory, keep_freed_memory
from workhorse.nn import DecoderConfig
from workhorse.train.recipe.training import TrainConfig


def take_steps(config: DecoderConfig, train: TrainConfig, count: int) -> None:
    step, batch = make_step(config, train), random_batch(config, train)
    for _ in range(count):
        step.update(*step.backward(batch), schedule=1.0)


def main() -> None:
    given = json.load(sys.stdin)
    config = DecoderConfig.from_dict(given["config"])
    train = TrainConfig.from_dict(given["train"])
    torch.set_num_threads(2)
    kinds = dict.fromkeys(config.layer_names())
    tiny = config.replace(vocab_size=512, n_layers=len(kinds), pattern=tuple(kinds))
    take_steps(tiny, train.replace(batch_size=1, micro_batch_size=None, seq_len=16), 1)
    with keep_freed_memory(CPU):
        give_back_freed_memory()
        before = resident()
        take_steps(config, train, 2)
        print(most_resident() - before)


if __name__ == "__main__":
    main()
