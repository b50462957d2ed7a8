"""Run directories and the checkpoints in them: whole or absent, and checked before use."""

from workhorse.checkpoints.disk import Disk
from workhorse.checkpoints.lock import FolderLock
from workhorse.checkpoints.manifest import DamagedCheckpoint
from workhorse.checkpoints.run_directory import RunDirectory
from workhorse.checkpoints.store import Checkpoint, CheckpointStore
from workhorse.checkpoints.tensors import (
    Places,
    copy_tensors,
    empty_decoder,
    load_weights,
    mapped_weights,
    weights_in_large_pages,
    weights_of,
)

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "DamagedCheckpoint",
    "Disk",
    "FolderLock",
    "Places",
    "RunDirectory",
    "copy_tensors",
    "empty_decoder",
    "load_weights",
    "mapped_weights",
    "weights_in_large_pages",
    "weights_of",
]
