"""Encodes documents into token shards in parallel; interrupted work can be resumed.

The folder of a data set is named after a hash of everything that determines its tokens: the
tokenizer, the configs of the sources, and the path, size and modification time of each file. So a
change of any of these makes a new data set, and runs with the same data can share one. Shards are
written one by one, and the manifest after each shard. An interrupted preparation resumes after the
last complete shard.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from workhorse.data.config import ConversationsConfig, DataConfig, SourceConfig
from workhorse.data.dataset import (
    Dataset,
    check_sums,
    mostly_held_out,
    open_dataset,
    open_shard,
    skipped_records,
    unknown_text,
)
from workhorse.data.documents import (
    Document,
    SplitName,
    check_text_files,
    iterate_documents,
    overlap_of,
    read_documents,
)
from workhorse.data.encoding import Encoded, TokenBuffer, encoded
from workhorse.data.manifest import ManifestConfig, StreamConfig, read_manifest
from workhorse.data.sources import (
    SPLITS,
    Progress,
    describe_sources,
    save_file_list,
    text_bytes,
    why_empty,
)
from workhorse.errors import WorkhorseError
from workhorse.files.writing import TEMPORARY, CannotWriteError, one_process_at_a_time, writing

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer, TokenizerConfig


def prepare_tokenizer(
    tokenizer_config: "TokenizerConfig",
    data_config: DataConfig,
    folder: Path,
    *,
    progress: Progress | None = None,
    notify: Callable[[str], object] = lambda line: None,
) -> "Tokenizer":
    """Train a tokenizer on the training split of a corpus, or load it if it was trained before.

    Args:
        tokenizer_config: config of the tokenizer. With `kind: file`, an existing tokenizer is
            loaded and nothing is stored.
        data_config: the corpus; its `cache_dir`, if set, replaces `folder`. If it has
            conversations, the tokenizer gets a chat template.
        folder: folder for trained tokenizers. Each is stored in a subfolder named after a hash of
            its config, the configs of the sources, and the path, size and modification time of
            each file of the corpus.
        progress: called with the bytes of text read so far and in total.
        notify: called with a warning if the tokenizer has fewer tokens than requested.

    Raises:
        WorkhorseError: a source cannot be read, or the tokenizer cannot be trained on it.
    """
    from workhorse.tokenizers import load_tokenizer, missing_tokens, train_tokenizer
    from workhorse.tokenizers.chat.template import with_template

    def finish(tokenizer: "Tokenizer") -> "Tokenizer":
        """Add a chat template if possible. Records of strings do not need one."""
        with contextlib.suppress(WorkhorseError):
            return with_template(tokenizer) if data_config.has_conversations else tokenizer
        return tokenizer

    if tokenizer_config.kind == "file":
        return finish(train_tokenizer(tokenizer_config, ()))
    sources = describe_sources(data_config)
    decides = [tokenizer_config.to_dict(), sources]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    root = data_config.kept_in(folder)
    home = root / f"tokenizer-{key}"
    if not home.exists():
        check_text_files(data_config)
        texts = _watched(iterate_documents(data_config), text_bytes(sources), progress)
        tokenizer = train_tokenizer(tokenizer_config, texts)
        try:
            tokenizer.save(home)
        except CannotWriteError:
            if not home.exists():  # otherwise another process has stored the same tokenizer
                raise
    tokenizer = load_tokenizer(home)
    if missing := missing_tokens(tokenizer_config, tokenizer):
        notify(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, {missing:,} fewer than "
            "tokenizer.vocab_size: the corpus is too small for more"
        )
    return finish(tokenizer)


def _watched(texts: Iterable[str], total: int | None, progress: Progress | None) -> Iterator[str]:
    done = 0
    for text in texts:
        yield text
        done += len(text.encode())
        if progress:
            progress(done, total)


StreamKey = tuple[SplitName, str]
"""The name of a split and the name of a source."""

SHARD_TOKENS = 1 << 25
"""Number of tokens at which a shard is written: 64 MiB of 16-bit tokens."""

REPORT_BYTES = 1 << 20
"""Number of bytes of text between two calls of the progress callback."""


def prepare(
    config: DataConfig,
    tokenizer: "Tokenizer",
    folder: Path,
    *,
    progress: Progress | None = None,
    verify: bool = False,
    notify: Callable[[str], object] = lambda line: None,
) -> Dataset:
    """Write the token shards of a corpus, or open them if they exist already.

    Args:
        config: the corpus; `config.cache_dir`, if set, replaces `folder`.
        tokenizer: the tokenizer; it must have the bos and eos tokens that the config asks for.
        folder: folder for data sets, usually `data` in the run directory.
        progress: called with the bytes of text encoded so far and in total.
        verify: True to compare the checksums of existing shards even if this process has already
            done so. A shard that is found damaged is written again in any case.
        notify: called with a warning if the validation split has more tokens than the training
            split, if the text has characters outside the vocabulary, or if records are skipped.

    Raises:
        WorkhorseError: a source cannot be read or changes while it is read, a split is empty, or
            the tokenizer lacks the bos or eos token.
    """
    fresh = _fresh_manifest(config, tokenizer)
    home = config.kept_in(folder) / _key(fresh)
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
    with _only_one_builder(home):
        manifest = _what_stands(home, fresh, verify)
        if not manifest.complete:
            for name, source in config.sources.items():
                if overlap := overlap_of(source):
                    notify(_overlap_line(overlap, config.key_of(name), source))
            for leftover in home.glob(f"{TEMPORARY}*"):
                leftover.unlink()
            _Build(config, tokenizer, home, manifest, progress).run()
    dataset = open_dataset(home, config.weights)
    for line in (mostly_held_out(dataset), unknown_text(dataset), skipped_records(dataset)):
        if line is not None:
            notify(line)
    return dataset


def _overlap_line(overlap: int, key: str, source: SourceConfig) -> str:
    dropped = getattr(source, "overlap", "keep") == "drop"
    outcome = "are skipped" if dropped else f"stay; {key}.overlap=drop skips them"
    return f"{overlap:,} training records are also in the validation data and {outcome}"


class _Build:
    """One run of `prepare`: writes the missing shards and records each in the manifest."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "Tokenizer",
        home: Path,
        manifest: ManifestConfig,
        progress: Progress | None,
    ) -> None:
        self.config, self.tokenizer, self.home, self.manifest = config, tokenizer, home, manifest
        self.progress = progress or (lambda _done, _total: None)
        self.total = text_bytes(manifest.sources)
        self.done = self.reported = 0

    def run(self) -> None:
        check_text_files(self.config)
        wanted: list[StreamKey] = [
            (split, name)
            for split in SPLITS
            for name, source in self.config.sources.items()
            if split == "train" or source.has_validation
        ]
        self.done = sum(self._stream(*key).bytes for key in wanted)
        tokens = encoded(
            self._documents([key for key in wanted if not self._stream(*key).complete]),
            self.tokenizer,
            bos=self.config.bos,
            eos=self.config.eos,
            dtype=self.manifest.dtype,
        )
        for key, documents in groupby(tokens, key=lambda item: item.stream):
            self._fill(*key, documents)
            self._finish(*key)
        for key in wanted:  # streams whose last shard was written just before an interruption
            self._finish(*key)
        if _fresh_manifest(self.config, self.tokenizer).sources != self.manifest.sources:
            raise WorkhorseError(
                "a source changed while it was read; run workhorse data prepare again"
            )
        save_file_list(self.config, self.home)
        self.manifest = self.manifest.replace(complete=True)
        self.manifest.save(self.home)
        self.progress(self.done, self.done)

    def _documents(self, wanted: Iterable[StreamKey]) -> Iterator[tuple[StreamKey, Document]]:
        """Yield the documents that are not yet encoded, stream by stream."""
        for split, name in wanted:
            source, stream = self.config.sources[name], self._stream(split, name)
            done_before = sum(shard.pieces for shard in stream.shards)
            documents = read_documents(source, split, key=self.config.key_of(name))
            documents = islice(documents, done_before, None)
            first = next(documents, None)
            if first is None and not stream.tokens:  # fail before the next streams are read
                raise WorkhorseError(why_empty(self.config, name, split))
            for document in chain([first] if first else [], documents):
                yield (split, name), document

    def _fill(
        self,
        split: SplitName,
        name: str,
        documents: Iterable[Encoded[StreamKey]],
    ) -> None:
        buffer = TokenBuffer()
        for document in documents:
            # Skipped documents belong to the shard before them: every shard has tokens.
            if buffer.n_tokens >= SHARD_TOKENS and not document.document.error:
                self._write(split, name, buffer)
                buffer = TokenBuffer()
            self.done += buffer.add(document)
            if self.done - self.reported >= REPORT_BYTES:
                self.progress(self.done, self.total)
                self.reported = self.done
        if buffer.n_tokens:
            self._write(split, name, buffer)
        elif buffer.skipped and not self._stream(split, name).tokens:
            raise WorkhorseError(
                f"{self.config.key_of(name)} skips all records of the {split} split, the first "
                f"because of {next(iter(buffer.skipped.values()))}"
            )

    def _finish(self, split: SplitName, name: str) -> None:
        stream = self._stream(split, name)
        if not stream.tokens:
            raise WorkhorseError(why_empty(self.config, name, split))
        if not stream.complete:
            self._record(split, name, stream.replace(complete=True))

    def _stream(self, split: SplitName, name: str) -> StreamConfig:
        return getattr(self.manifest, split).get(name, StreamConfig())

    def _write(self, split: SplitName, name: str, buffer: "TokenBuffer") -> None:
        stream = self._stream(split, name)
        shard = buffer.write(self.home, f"{split}-{name}-{len(stream.shards):05d}")
        self._record(split, name, stream.replace(shards=[*stream.shards, shard]))

    def _record(self, split: SplitName, name: str, stream: StreamConfig) -> None:
        streams = {**getattr(self.manifest, split), name: stream}
        self.manifest = self.manifest.replace(**{split: streams})
        self.manifest.save(self.home)


def _fresh_manifest(config: DataConfig, tokenizer: "Tokenizer") -> ManifestConfig:
    """Return a manifest without shards, with everything that determines the data set's tokens."""
    check_separators(config, bos=tokenizer.bos_id is not None, eos=tokenizer.eos_id is not None)
    sources = describe_sources(config)
    for name, source in config.sources.items():
        if isinstance(source, ConversationsConfig):
            sources[name]["template"] = tokenizer.chat_templates
    return ManifestConfig(
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        bos=config.bos,
        eos=config.eos,
        sources=sources,
    )


def check_separators(config: DataConfig, *, bos: bool, eos: bool) -> None:
    """Check that the tokenizer has the bos and eos tokens that the config asks for.

    `bos` and `eos` are True if the tokenizer has the token.

    Raises:
        WorkhorseError: a token that the config asks for is missing.
    """
    for wanted, name, there in ((config.bos, "bos", bos), (config.eos, "eos", eos)):
        if wanted and not there:
            raise WorkhorseError(
                f"data.{name} is true but the tokenizer has no {name} token; set data.{name}: false"
            )


def _key(manifest: ManifestConfig) -> str:
    content = json.dumps(manifest.to_dict(), sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _what_stands(home: Path, fresh: ManifestConfig, verify: bool) -> ManifestConfig:
    """Return the manifest stored in a folder, or `fresh` if there is no valid one.

    Damaged shards, and the shards after them, are removed from it, so that they are written again.
    """
    try:
        manifest = read_manifest(home)
    except WorkhorseError:
        return fresh
    sound = {
        split: {name: _sound(home, stream, verify) for name, stream in streams.items()}
        for split, streams in ((split, getattr(manifest, split)) for split in SPLITS)
    }
    whole = all(sound[split] == getattr(manifest, split) for split in SPLITS)
    return manifest.replace(**sound, complete=manifest.complete and whole)


def _sound(home: Path, stream: StreamConfig, verify: bool) -> StreamConfig:
    """Return a stream with only the shards before its first damaged shard."""
    for index, shard in enumerate(stream.shards):
        try:
            open_shard(home, shard)
            if verify:
                check_sums(home, shard, again=True)
        except WorkhorseError:
            return StreamConfig(shards=stream.shards[:index])
    return stream


@contextlib.contextmanager
def _only_one_builder(home: Path) -> Iterator[None]:
    """Let only one process prepare a folder at a time; other processes wait.

    If the preparation fails and leaves the folder empty, the folder is removed.
    """
    with one_process_at_a_time(home):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                home.rmdir()
