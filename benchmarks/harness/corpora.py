"""Corpora and tokenizer for encoding benchmarks, each made once and stored."""

import json
import tempfile
from pathlib import Path

from workhorse.data import DataConfig, iterate_documents
from workhorse.data.stdlib import modules
from workhorse.tokenizers import BpeConfig, Tokenizer, load_tokenizer, train_tokenizer

VOCAB_SIZE = 16_000
CORPUS_BYTES = 24_000_000
"""Shorter corpora are repeated up to about this size."""
MODULES = "modules"
"""Name of the corpus of the standard library's modules, one document each."""


def documents(data: str, root: str) -> Path:
    """A file of JSON lines: the standard library's modules, or copies of a text file."""
    path = Path(root) / f"{Path(data).stem}.jsonl"
    if not path.exists():
        texts = (
            [module.text() for module in modules()] if data == MODULES else [Path(data).read_text()]
        )
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines * max(1, CORPUS_BYTES // sum(map(len, lines)))))
    return path


def corpus(data: str, root: str) -> DataConfig:
    """The file of `documents` as a corpus without a validation split."""
    source = {"kind": "jsonl", "path": str(documents(data, root)), "validation_fraction": 0.0}
    return DataConfig.from_dict({"corpus": source})


def tokenizer(data: str, root: str) -> Tokenizer:
    """A byte-level BPE tokenizer trained on that corpus."""
    folder = Path(root) / f"tokenizer-{Path(data).stem}"
    if not folder.exists():
        learned = train_tokenizer(
            BpeConfig(vocab_size=VOCAB_SIZE), iterate_documents(corpus(data, root))
        )
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            learned.save(Path(temporary) / "new")
            (Path(temporary) / "new").rename(folder)
    return load_tokenizer(folder)
