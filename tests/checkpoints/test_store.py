import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workhorse.checkpoints import CheckpointStore, DamagedCheckpoint, Disk
from workhorse.errors import WorkhorseError

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


def contents(step: int) -> dict[str, Any]:
    """Arguments of `save` for a step, different for each step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "model": {"a": torch.randn(3, 4, generator=generator), "b": torch.tensor(step)},
        "optimizer": {"a.mean": torch.randn(3, 4, generator=generator)},
        "state": {"counters": {"step": step}, "third": 1 / 3},
    }


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store with checkpoints at steps 10, 20 and 30."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        store.save(**contents(step))
    return store


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)


def flip_a_bit(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def cut_short(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def remove(file: Path, chance: random.Random) -> None:
    file.unlink()


def test_what_was_saved_comes_back(store: CheckpointStore) -> None:
    checkpoint = store.newest()
    assert checkpoint is not None
    expected = contents(30)
    assert checkpoint.step == 30
    assert checkpoint.state == expected["state"]
    for part in ("model", "optimizer"):
        tensors = getattr(checkpoint, part)
        assert tensors.keys() == expected[part].keys()
        assert all(torch.equal(tensors[name], expected[part][name]) for name in tensors)


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    store.save(**contents(40))
    assert store.steps() == [40, 30, 20]
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "step-00000020",
        "step-00000030",
        "step-00000040",
    ]


def test_no_pickle_and_readable_by_others(store: CheckpointStore) -> None:
    files = sorted(store.path(30).iterdir())
    assert tuple(file.name for file in files) == FILES
    modes = {file.stat().st_mode for file in files}
    assert len(modes) == 1  # the mode of any new file of the user


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest() is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, remove])
def test_damage_is_found_and_the_newest_good_one_used(
    store: CheckpointStore,
    chance: random.Random,
    name: str,
    damage: Callable[[Path, random.Random], None],
) -> None:
    damage(store.path(30) / name, chance)
    skipped: list[str] = []
    checkpoint = store.newest(skipped.append)
    assert checkpoint is not None
    assert checkpoint.step == 20
    assert len(skipped) == 1
    assert "step-00000030" in skipped[0]
    assert name in skipped[0]
    with pytest.raises(DamagedCheckpoint, match=r"is damaged: .*; use an older one"):
        store.load(30)


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(store: CheckpointStore) -> None:
    file = store.path(30) / "manifest.json"
    whole = file.read_bytes()
    for place, byte in enumerate(whole):
        changed = bytearray(whole)
        changed[place] = byte ^ 1 << place % 8
        file.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint):
            store.check(30)
    file.write_bytes(whole)
    store.check(30)


def test_a_renamed_checkpoint_is_not_another_step(store: CheckpointStore) -> None:
    store.path(30).rename(store.path(50))
    with pytest.raises(DamagedCheckpoint, match="not as it was written"):
        store.load(50)


def test_a_newer_format_is_named(store: CheckpointStore) -> None:
    file = store.path(30) / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DamagedCheckpoint, match="its format 2 is newer than 1"):
        store.load(30)


def test_weights_alone_do_not_need_the_optimizer(store: CheckpointStore) -> None:
    (store.path(30) / "optimizer.safetensors").unlink()
    weights, state = store.load_model(30)
    assert torch.equal(weights["a"], contents(30)["model"]["a"])
    assert state == contents(30)["state"]


def test_leftovers_of_a_killed_save_are_removed(store: CheckpointStore, tmp_path: Path) -> None:
    leftover = store.folder / ".tmp-step-00000040"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    (store.folder / ".tmp-step-00000050").symlink_to(tmp_path)
    assert store.steps() == [30, 20, 10]
    assert store.newest().step == 30
    assert leftover.exists()  # reading deletes nothing
    store.clean()
    assert not list(store.folder.glob(".*"))
    assert tmp_path.exists()


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(store: CheckpointStore) -> None:
    remove(store.path(30) / "state.json", random.Random())
    store.save(**contents(30))
    assert store.newest().step == 30


def test_whole_weights_are_found_without_their_optimizer(store: CheckpointStore) -> None:
    (store.path(30) / "optimizer.safetensors").unlink()
    assert store.newest_weights() == 30
    assert store.newest_state() == (20, contents(20)["state"])


def test_a_damaged_newer_checkpoint_displaces_no_whole_one(store: CheckpointStore) -> None:
    """A damaged newer checkpoint must not count for `keep`, or no intact one might remain."""
    (store.path(30) / "optimizer.safetensors").unlink()
    store.keep = 1
    store.save(**contents(25))
    assert store.steps() == [30, 25]
    assert store.newest().step == 25
    store.save(**contents(30))
    assert store.steps() == [30]
    assert store.newest().step == 30


def test_a_damaged_checkpoint_takes_no_place_of_a_whole_one(store: CheckpointStore) -> None:
    """A later process also ignores it for `keep`, although that process has not read it."""
    store.keep = 2
    (store.path(30) / "optimizer.safetensors").unlink()
    assert store.newest().step == 20
    store.prune(20)
    assert store.steps() == [30, 20, 10]  # the run has not passed the damaged step yet
    store.save(**contents(40))
    assert store.steps() == [40, 20]
    CheckpointStore(store.folder, keep=2).prune(40)
    assert store.steps() == [40, 20]


def test_a_damaged_checkpoint_made_again_counts(store: CheckpointStore) -> None:
    store.keep = 2
    (store.path(30) / "optimizer.safetensors").unlink()
    assert store.newest().step == 20
    store.save(**contents(30))
    assert store.steps() == [30, 20]
    store.save(**contents(40))
    assert store.steps() == [40, 30]


def test_a_checkpoint_moved_away_and_linked_is_pruned_as_a_link(
    store: CheckpointStore, tmp_path: Path
) -> None:
    store.path(10).rename(tmp_path / "elsewhere")
    store.path(10).symlink_to(tmp_path / "elsewhere")
    store.save(**contents(40))
    assert store.steps() == [40, 30, 20]
    assert (tmp_path / "elsewhere/model.safetensors").exists()
    assert not list(store.folder.glob(".*"))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\x00", b"[1, 2]", b"{}", b"[" * 100_000],
    ids=lambda content: repr(content[:9]),
)
def test_a_manifest_of_anything_else_is_damage(store: CheckpointStore, content: bytes) -> None:
    (store.path(30) / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json cannot be read"):
        store.check(30)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(store: CheckpointStore, name: str) -> None:
    (store.path(30) / name).unlink()
    os.mkfifo(store.path(30) / name)
    with pytest.raises(DamagedCheckpoint, match=rf"{name} is not a regular file"):
        store.check(30)


READERS: dict[str, Callable[[CheckpointStore], Any]] = {
    "newest": lambda store: store.newest(pytest.fail),
    "newest_state": lambda store: store.newest_state(pytest.fail),
    "newest_state_alone": lambda store: store.newest_state(pytest.fail, alone=True),
    "newest_model": lambda store: store.newest_model(pytest.fail),
    "newest_weights": lambda store: store.newest_weights(),
    "newest_folder": lambda store: store.newest_folder(
        lambda folder: [(folder / name).read_bytes() for name in FILES]
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_step_removed_between_listing_and_opening_gives_way_to_the_newer_one(
    store: CheckpointStore, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = CheckpointStore(store.folder.parent / "expected")
    expected.save(**contents(40))
    listed = store.steps()
    training = CheckpointStore(store.folder, keep=1)

    def steps() -> list[int]:
        monkeypatch.undo()
        training.save(**contents(40))
        return listed

    monkeypatch.setattr(store, "steps", steps)
    # Compare the repr, since `==` on structures of tensors is ambiguous.
    assert repr(READERS[reader](store)) == repr(READERS[reader](expected))


@pytest.mark.parametrize("opened", range(1, 4))
def test_a_step_removed_while_its_files_are_opened_is_read_whole_or_not_at_all(
    store: CheckpointStore, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = CheckpointStore(store.folder, keep=1)
    files: list[object] = []
    real = os.open

    def saved_meanwhile(path: Any, *rest: Any, **names: Any) -> int:
        file = real(path, *rest, **names)
        if "step-00000030" in str(path) and not str(path).endswith("manifest.json"):
            files.append(path)
            if len(files) == opened:
                training.save(**contents(40))
        return file

    monkeypatch.setattr(os, "open", saved_meanwhile)
    checkpoint = store.newest(pytest.fail)
    assert checkpoint is not None
    expected = contents(checkpoint.step)
    assert checkpoint.step == (30 if opened == 3 else 40)
    assert checkpoint.state == expected["state"]
    assert torch.equal(checkpoint.model["a"], expected["model"]["a"])
    assert torch.equal(checkpoint.optimizer["a.mean"], expected["optimizer"]["a.mean"])


def test_steps_removed_faster_than_they_are_read_are_told(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "steps", lambda: [40])
    with pytest.raises(WorkhorseError, match=r"was removed before it was read; wait until"):
        store.newest()


class RecordingDisk(Disk):
    """A disk that records its operations, and fails at the operation `fail_at`."""

    def __init__(self, fail_at: int = -1) -> None:
        self.done: list[str] = []
        self.fail_at = fail_at

    def _note(self, operation: str, path: Path) -> None:
        self.done.append(f"{operation} {path.name}")
        if len(self.done) - 1 == self.fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def make_folder(self, path: Path) -> None:
        self._note("make", path)
        super().make_folder(path)

    def lay_out(self, path, slices) -> None:
        self._note("lay out", path)
        super().lay_out(path, slices)

    def fill(self, path, slices) -> None:
        self._note("write", path)
        super().fill(path, slices)

    def write_text(self, path: Path, text: str) -> None:
        self._note("write", path)
        super().write_text(path, text)

    def sync(self, path: Path) -> None:
        self._note("sync", path)
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._note("rename", target)
        super().rename(source, target)


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path) -> None:
    disk = RecordingDisk()
    CheckpointStore(tmp_path / "checkpoints", disk=disk).save(**contents(10))
    order = disk.done
    rename = order.index("rename step-00000010")
    for name in FILES:
        assert order.index(f"write {name}") < order.index(f"sync {name}") < rename
    assert order.index("write manifest.json") > order.index("sync state.json")
    assert order[rename - 1] == "sync .tmp-step-00000010"
    assert order[rename + 1] == "sync checkpoints"


@pytest.mark.parametrize("operation", range(13))
def test_a_full_disk_leaves_the_others_whole(store: CheckpointStore, operation: int) -> None:
    store.disk = RecordingDisk(fail_at=operation)
    with pytest.raises(
        WorkhorseError, match=r"step-00000040: No space left .*step-00000030; free some disk space"
    ):
        store.save(**contents(40))
    assert store.steps() == [30, 20, 10]
    assert [store.load(step).step for step in store.steps()] == [30, 20, 10]
    assert not list(store.folder.glob(".*"))
    store.disk = Disk()
    store.save(**contents(40))
    assert store.newest().step == 40


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_offset_leaves_the_others_whole(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The disk accepts a limited number of bytes of the tensors."""
    write = os.pwrite
    left = 0

    def limited(file: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if left == 0:
            raise OSError(number, os.strerror(number))
        written = write(file, data[:left], offset)
        left -= written
        return written

    monkeypatch.setattr(os, "pwrite", limited)
    tensors = (*contents(40)["model"].values(), *contents(40)["optimizer"].values())
    size = sum(tensor.nbytes for tensor in tensors)
    for part in range(50):
        left = part * size // 50
        with pytest.raises(WorkhorseError, match=rf"40: {os.strerror(number)}.*step-00000030"):
            store.save(**contents(40))
        assert [store.load(step).step for step in store.steps()] == [30, 20, 10]
        assert not list(store.folder.glob(".*"))
    left = size
    store.save(**contents(40))
    assert store.newest().step == 40


def test_a_limit_on_the_size_of_files_is_told_in_the_systems_words(tmp_path: Path) -> None:
    """The limit is set in a separate process, since it cannot be undone."""
    script = """
import resource, sys, torch
from pathlib import Path
from workhorse.checkpoints import CheckpointStore
from workhorse.errors import WorkhorseError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    CheckpointStore(Path(sys.argv[1])).save(10, {"a": torch.zeros(5000)}, {}, {})
except WorkhorseError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        f"cannot write checkpoint {tmp_path}/step-00000010: {os.strerror(errno.EFBIG)}; none "
        "is saved yet; raise the limit on file sizes (ulimit -f), or choose another path, then "
        "run again with --resume\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("refused", ["rename", "remove"])
def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The file may be open on NFS, or belong to another user. A later save deletes it."""
    (store.folder / ".tmp-mine").mkdir()
    with monkeypatch.context() as broken:
        real = getattr(Disk, refused)

        def refuse(disk: Disk, path: Path, *target: Path) -> None:
            if "step-00000010" in path.name:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            real(disk, path, *target)

        broken.setattr(Disk, refused, refuse)
        for step in (40, 50):
            store.save(**contents(step))
        (remark,) = store.remarks
        assert "00000010" in remark
        assert "Device or resource busy; training continues" in remark
        assert store.steps()[:3] == [50, 40, 30]
    store.save(**contents(60))
    assert store.steps() == [60, 50, 40]
    assert [path.name for path in store.folder.glob(".*")] == [
        ".tmp-mine"
    ]  # not a temporary name of the store


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_not_passed_over_as_damaged(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An error such as too many open files must not make a run resume from an older checkpoint."""
    real = os.open

    def refuse(path: Path, *given: Any) -> int:
        if Path(path) == store.path(30) / name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path, *given)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WorkhorseError, match=rf"cannot read .*{name}: Too many open files"):
        store.newest()


def test_a_folder_that_cannot_be_listed_fails_no_save_and_hides_no_error(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_store: CheckpointStore) -> list[int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(CheckpointStore, "steps", refuse)
        store.save(**contents(40))
        assert len(store.remarks) == 1
        store.disk = RecordingDisk(fail_at=0)
        with pytest.raises(
            WorkhorseError, match=r"step-00000050: No space left .*; free some disk space"
        ):
            store.save(**contents(50))
    store.disk = Disk()
    store.save(**contents(60))
    assert store.steps() == [60, 40, 30]


def test_remains_of_the_same_step_that_cannot_be_deleted_fail_no_save(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store.folder / ".tmp-step-00000040").mkdir()

    def refuse(_disk: Disk, path: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Disk, "remove", refuse)
    store.save(**contents(40))
    assert store.load(40).step == 40
    assert len(store.remarks) == 1


def test_state_is_plain_json(store: CheckpointStore) -> None:
    state = json.loads((store.path(30) / "state.json").read_text())
    assert state["third"] == 1 / 3
