"""The tokenizer of a corpus, trained once and kept beside its token shards."""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workhorse.data.config import DataConfig
from workhorse.data.corpus.documents import check_text_files, iterate_texts
from workhorse.data.corpus.sources import Progress, describe_sources, text_bytes
from workhorse.files.writing import writing

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer, TokenizerConfig


def prepare_tokenizer(
    tokenizer_config: "TokenizerConfig",
    data_config: DataConfig,
    folder: Path,
    *,
    progress: Progress | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> "Tokenizer":
    """Train a tokenizer on the training texts of a corpus, or load it if nothing changed.

    Args:
        tokenizer_config: what to train; one from a file is loaded and not stored again.
        data_config: the texts; its `cache_dir`, if set, takes the place of `folder`.
        folder: where tokenizers are kept, each in a folder named after what determines it.
        progress: called with the amount of text that the training has read.
        tell: called with warnings: that it has fewer tokens than asked for.

    Raises:
        WorkhorseError: a source cannot be read, or the tokenizer cannot be trained on it.
    """
    from workhorse.tokenizers import load_tokenizer, missing_tokens, train_tokenizer

    if tokenizer_config.kind == "file":
        return train_tokenizer(tokenizer_config, ())
    sources = describe_sources(data_config)
    decides = [tokenizer_config.to_dict(), sources]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    root = data_config.kept_in(folder)
    home = root / f"tokenizer-{key}"
    if not home.exists():
        check_text_files(data_config)
        texts = _watched(iterate_texts(data_config), text_bytes(sources), progress)
        tokenizer = train_tokenizer(tokenizer_config, texts)
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=root) as temporary:
            tokenizer.save(Path(temporary) / "new")
            with contextlib.suppress(OSError):  # another process was faster, with the same
                (Path(temporary) / "new").rename(home)
    tokenizer = load_tokenizer(home)
    if missing := missing_tokens(tokenizer_config, tokenizer):
        tell(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, {missing:,} fewer than "
            "tokenizer.vocab_size: the corpus holds too little to fill more"
        )
    return tokenizer


def _watched(texts: Iterable[str], total: int | None, progress: Progress | None) -> Iterator[str]:
    done = 0
    for text in texts:
        yield text
        done += len(text.encode())
        if progress:
            progress(done, total)
