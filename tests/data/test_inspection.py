from pathlib import Path

from workhorse.data import Batches, DataConfig, ValidationBatches, describe, prepare, view_rows


def test_rows_are_shown_document_by_document(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name, text in [("a", "twelve bytes"), ("b", "three"), ("c", "five")]:
        (tmp_path / "texts" / name).write_text(text)
    corpus = {"kind": "folder", "path": tmp_path / "texts", "validation_fraction": 0}
    dataset = prepare(DataConfig(corpus=corpus), tokenizer, tmp_path / "data")
    batches = Batches(dataset.train, seq_len=20, batch_size=2, packing="documents")
    views = view_rows(batches[0], tokenizer, batches.source_names)
    long, short = sorted(views, key=lambda view: view.padding)
    assert [segment.text for segment in long.segments] == ["twelve bytes", "three"]
    assert [segment.document for segment in long.segments] == [0, 1]
    assert [segment.last_target for segment in long.segments] == ["<eos>", "<eos>"]
    assert (long.padding, long.ignored) == (3, 3)
    assert [segment.text for segment in short.segments] == ["five"]
    assert (short.source, short.padding, short.ignored) == ("corpus", 16, 16)


def test_windows_are_shown_whole(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789abcd")
    corpus = {"kind": "text", "path": tmp_path / "a.txt", "validation_fraction": 0}
    dataset = prepare(DataConfig(corpus=corpus, eos=False), tokenizer, tmp_path / "data")
    batches = ValidationBatches(dataset.train, seq_len=8, batch_size=3)
    first, tail, padding = view_rows(batches[0], tokenizer, batches.source_names)
    assert [(s.document, s.text, s.last_target) for s in first.segments] == [
        (None, "01234567", "8")
    ]
    assert [(s.text, s.last_target) for s in tail.segments] == [("89abc", "d")]
    assert (tail.padding, tail.ignored) == (3, 3)
    assert (padding.source, padding.segments, padding.padding) == ("padding", (), 8)


def test_counts_of_a_data_set(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 100)
    corpus = {"kind": "text", "path": tmp_path / "a.txt"}
    dataset = prepare(DataConfig(corpus=corpus), tokenizer, tmp_path / "data")
    described = describe(dataset)
    assert described["splits"]["train"]["corpus"] == {
        "documents": 1,
        "bytes": 180,
        "tokens": 181,
        "bytes_per_token": 180 / 181,
        "unknown": 0,
        "weight": 1.0,
    }
    assert described["splits"]["validation"]["corpus"]["bytes"] == 20
    assert described["fingerprint"] == dataset.fingerprint
