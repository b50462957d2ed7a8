"""Models on disk: run directories and their checkpoints, Hugging Face directories, GGUF files."""

from workhorse.checkpoints.runs.manifest import MODEL, OPTIMIZER, DamagedCheckpoint, Disk
from workhorse.checkpoints.runs.run_directory import FolderLock, RunDirectory
from workhorse.checkpoints.runs.store import Checkpoint, CheckpointStore
from workhorse.checkpoints.tensors import (
    Places,
    empty_decoder,
    load_weights,
    mapped_weights,
    weights_of,
)

__all__ = [
    "MODEL",
    "OPTIMIZER",
    "Checkpoint",
    "CheckpointStore",
    "DamagedCheckpoint",
    "Disk",
    "FolderLock",
    "Places",
    "RunDirectory",
    "empty_decoder",
    "load_weights",
    "mapped_weights",
    "weights_of",
]
