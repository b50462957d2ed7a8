"""Text in, batches out: corpus readers, memory-mapped token shards, rows by step.

dataset = prepare(config, tokenizer, folder)
batches = Batches(dataset.train, seq_len=256, batch_size=16, seed=1)
batch = batches[step]
"""

from workhorse.data.beginning import Beginning, beginning, beginning_token
from workhorse.data.config import DataConfig, SourceConfig, source_of
from workhorse.data.corpus.documents import (
    Document,
    check_source_files,
    iterate_texts,
    read_documents,
)
from workhorse.data.corpus.sources import check_sources
from workhorse.data.rows.batches import Batch, Batches, ValidationBatches
from workhorse.data.rows.inspection import RowView, describe, view_rows
from workhorse.data.rows.sampling import IGNORE
from workhorse.data.shards.dataset import Dataset, Split, open_dataset
from workhorse.data.shards.encode import stream_of
from workhorse.data.shards.preparation import check_separators, prepare
from workhorse.data.shards.stream import TokenStream
from workhorse.data.shards.tokenizer import prepare_tokenizer

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
