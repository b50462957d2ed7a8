"""Encoding a corpus: MB per second beside the `tokenizers` library, and peak memory.

    python -m benchmarks.tokenize [--data tinyshakespeare.txt]

Both read a file of JSON lines. Ours is the whole of `workhorse data prepare`: splitting, encoding,
checksums, and shards on disk. The library's is one call on all cores with every document in memory,
including reading the ids from its result.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.command import main, parser, with_models
from benchmarks.harness.contest import Case
from benchmarks.harness.worker import Contestant, Round


def ours(data: str, root: str, threads: int) -> Round:
    """Rounds of preparing a corpus in a new folder."""
    from benchmarks.harness.corpora import corpus, tokenizer
    from workhorse.data import prepare

    del threads  # the library reads the environment
    config, encoder = corpus(data, root), tokenizer(data, root)

    def take() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            made = prepare(config, encoder, Path(folder))
            seconds = time.perf_counter() - started
            splits = [made.train, *([made.validation] if made.validation else [])]
            return {"mbytes": sum(split.n_bytes for split in splits) / seconds / 1e6}

    return take


def library(data: str, root: str, threads: int) -> Round:
    """Rounds of encoding documents that are in memory."""
    from tokenizers import Tokenizer

    from benchmarks.harness.corpora import documents, tokenizer

    del threads
    path = documents(data, root)
    encoder = Tokenizer.from_str(tokenizer(data, root).definition)

    def take() -> dict[str, float]:
        started = time.perf_counter()
        with path.open() as file:
            texts = [json.loads(line)["text"] for line in file]
        ids = [one.ids for one in encoder.encode_batch_fast(texts, add_special_tokens=False)]
        seconds = time.perf_counter() - started
        assert len(ids) == len(texts)
        return {"mbytes": sum(len(text.encode()) for text in texts) / seconds / 1e6}

    return take


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The standard library's modules, and the given file."""
    for data in ("modules", *([str(options.data.resolve())] if options.data else [])):
        same = {"data": data, "root": str(options.models)}
        contestants = (
            Contestant("Workhorse", "benchmarks.tokenize:ours", same, "from the file to shards"),
            Contestant("tokenizers", "benchmarks.tokenize:library", same, "all text in memory"),
        )
        yield Case(Path(data).stem, "mbytes", "MB/s", contestants)


def options() -> argparse.ArgumentParser:
    """The command-line parser."""
    made = with_models(parser(__doc__ or ""))
    made.add_argument("--data", type=Path, metavar="FILE", help="a text file to measure too")
    return made


if __name__ == "__main__":
    main("tokenize", cases, options().parse_args())
