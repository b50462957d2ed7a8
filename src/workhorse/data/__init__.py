"""Training data: corpus readers, memory-mapped token shards, and batches addressed by step.

dataset = prepare(config, tokenizer, folder)
batches = Batches(dataset.train, seq_len=256, batch_size=16, seed=1)
batch = batches[step]
"""

from workhorse.data.batches import Batch, Batches, ValidationBatches
from workhorse.data.config import (
    Beginning,
    DataConfig,
    SourceConfig,
    beginning,
    beginning_token,
    source_of,
)
from workhorse.data.dataset import Dataset, Split, TokenStream, open_dataset
from workhorse.data.documents import (
    Document,
    check_source_files,
    iterate_texts,
    read_documents,
)
from workhorse.data.inspection import RowView, describe, view_rows
from workhorse.data.preparation import check_separators, prepare, prepare_tokenizer, stream_of
from workhorse.data.sampling import IGNORE
from workhorse.data.sources import check_sources

__all__ = [
    "IGNORE",
    "Batch",
    "Batches",
    "Beginning",
    "DataConfig",
    "Dataset",
    "Document",
    "RowView",
    "SourceConfig",
    "Split",
    "TokenStream",
    "ValidationBatches",
    "beginning",
    "beginning_token",
    "check_separators",
    "check_source_files",
    "check_sources",
    "describe",
    "iterate_texts",
    "open_dataset",
    "prepare",
    "prepare_tokenizer",
    "read_documents",
    "source_of",
    "stream_of",
    "view_rows",
]
