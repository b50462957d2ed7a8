"""Training data: corpus readers, memory-mapped token shards, and batches addressed by step.

dataset = prepare(config, tokenizer, folder)
batches = Batches(dataset.train, seq_len=256, batch_size=16, seed=1)
batch = batches[step]
"""

from workhorse.data.batches import Batch, Batches, RowView, ValidationBatches, describe, view_rows
from workhorse.data.config import (
    DataConfig,
    SequenceStart,
    SourceConfig,
    sequence_start,
    source_of,
    start_token,
)
from workhorse.data.dataset import Dataset, Split, TokenStream, open_dataset
from workhorse.data.documents import Document, check_source_files, iterate_documents, read_documents
from workhorse.data.encoding import stream_of
from workhorse.data.preparation import check_separators, prepare, prepare_tokenizer
from workhorse.data.sampling import IGNORE
from workhorse.data.sources import check_sources

__all__ = [
    "IGNORE",
    "Batch",
    "Batches",
    "DataConfig",
    "Dataset",
    "Document",
    "RowView",
    "SequenceStart",
    "SourceConfig",
    "Split",
    "TokenStream",
    "ValidationBatches",
    "check_separators",
    "check_source_files",
    "check_sources",
    "describe",
    "iterate_documents",
    "open_dataset",
    "prepare",
    "prepare_tokenizer",
    "read_documents",
    "sequence_start",
    "source_of",
    "start_token",
    "stream_of",
    "view_rows",
]
