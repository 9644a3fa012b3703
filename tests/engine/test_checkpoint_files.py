"""Tests of checkpoint files: they are written as a whole or not at all, and load as saved."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import keepers
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from keepers import load, message, new_ranks, on_all, save

from accordion_hvd.engine import checkpoint_files
from accordion_hvd.engine.checkpoint import load_state, save_state

RANK_1 = "rank-00001-of-00002.npz"


def names(folder: Path) -> list[str]:
    """Return the names in a folder, without that of the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != checkpoint_files.LOCK)


def saved(folder: Path, count: int, ranks: int = 2) -> Path:
    """Save states 1, 2, ...; return the folder of the last one."""
    for number in range(1, count + 1):
        assert not any(save(folder, number, ranks))
    return folder / f"state-{count:05d}"


# ------------------------------------------------------------------------------ what was saved
TYPES = st.sampled_from(["float32", "float16", "int64", "uint8", "bool"])
ARRAYS = st.dictionaries(
    st.text("abc/", min_size=1, max_size=5).filter(lambda name: ".." not in name),
    TYPES.flatmap(lambda kind: arrays_of.arrays(kind, arrays_of.array_shapes(min_dims=0))),
    max_size=3,
)


@settings(deadline=None, max_examples=50)
@given(st.lists(ARRAYS, min_size=1, max_size=3))
def test_what_is_loaded_is_what_was_saved(found: list[Mapping[str, np.ndarray]]) -> None:
    savers, loaders = new_ranks(len(found)), new_ranks(len(found))
    for saver, arrays in zip(savers, found, strict=True):
        saver.arrays = arrays
    with tempfile.TemporaryDirectory() as folder:
        assert not any(on_all(savers, lambda saver: save_state(folder, only=[saver])))
        assert not any(on_all(loaders, lambda loader: load_state(folder, only=[loader])))
    for loader, arrays in zip(loaders, found, strict=True):
        assert loader.arrays.keys() == arrays.keys()
        for name, x in arrays.items():
            np.testing.assert_array_equal(loader.arrays[name], x, strict=True)


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for number in range(1, 5):
        saved_so_far = range(max(1, number - 1), number + 1)
        assert not any(save(folder, number))
        assert names(folder) == [f"state-{kept:05d}" for kept in saved_so_far]
        assert load(folder) == number
    assert load(folder / "state-00003") == 3


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("of the user")
    saved(tmp_path, 4)
    assert load(tmp_path) == 4
    assert names(tmp_path) == ["model.pt", "state-00003", "state-00004"]


def test_incomplete_ones_do_not_push_out_complete_ones(tmp_path: Path) -> None:
    os.truncate(saved(tmp_path, 2) / RANK_1, 100)
    assert not any(save(tmp_path, 3))
    assert names(tmp_path) == ["state-00001", "state-00002", "state-00003"]
    assert not any(save(tmp_path, 4))
    assert names(tmp_path) == ["state-00003", "state-00004"]


# ------------------------------------------------------------------------------------ what is told
def changed(path: Path, at: int, into: int) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    at %= len(content)
    content[at] = into if into != content[at] else into ^ 1
    path.write_bytes(content)


def edited(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edited_and_signed(at: Path, **values: Any) -> None:
    manifest = checkpoint_files.read_manifest(at) | values
    edited(at / "manifest.json", **values, checksum=checkpoint_files._checksum(manifest))


DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "cut short": (lambda at: os.truncate(at / RANK_1, 100), (RANK_1, "has 100 bytes", "must have")),
    "missing": (lambda at: (at / RANK_1).unlink(), ("files of ranks [1] of 2 are missing",)),
    "changed": (lambda at: changed(at / RANK_1, 500, 7), (RANK_1, "checksum is", "but was")),
    "another rank's": (
        lambda at: shutil.copy(at / RANK_1.replace("rank-00001", "rank-00000"), at / RANK_1),
        (RANK_1, "checksum is", "but was"),
    ),
    "no JSON": (
        lambda at: os.truncate(at / "manifest.json", 50),
        ("manifest.json is not JSON", "line"),
    ),
    "nested": (
        lambda at: (at / "manifest.json").write_bytes(b"[" * 100_000),
        ("manifest.json is not JSON",),
    ),
    "no text": (
        lambda at: (at / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        ("manifest.json is not JSON",),
    ),
    "a list": (lambda at: (at / "manifest.json").write_text("[]"), ("a list", "an object")),
    "edited": (
        lambda at: edited(at / "manifest.json", version="9"),
        ("manifest.json has changed", "checksum is"),
    ),
    "of too many ranks": (
        lambda at: edited_and_signed(at, ranks=2**70),
        (f"files of ranks [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...] of {2**70} are missing",),
    ),
    "of no integer": (
        lambda at: edited_and_signed(at, ranks="2"),
        ("ranks '2'", "an integer of at least 1"),
    ),
    "of no ranks": (lambda at: edited_and_signed(at, ranks=0), ("ranks 0", "at least 1")),
    "unfinished": (lambda at: (at / "manifest.json").unlink(), ("not written to its end",)),
}
by_damage = pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)


@by_damage
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_damage_is_named_on_all_ranks(
    damage: Callable[[Path], Any], words: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    damage(saved(tmp_path, 1))
    told = load(tmp_path, ranks)
    assert isinstance(told, str)
    assert told.startswith(f"state: reading from {tmp_path} failed: state-00001: ")
    assert all(word in told for word in words), told


@by_damage
def test_the_one_before_is_loaded_and_rank_0_says_so(
    damage: Callable[[Path], Any],
    words: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(saved(tmp_path, 2))
    assert load(tmp_path) == 1
    (line,) = caplog.messages
    assert line.startswith(
        f"accordion_hvd: continuing from {tmp_path / 'state-00001'}, saved after"
    )
    assert all(word in line for word in ("after step 1,", "state-00002: ", *words)), line


@pytest.mark.parametrize("number", [2, 0, "1", None])
def test_other_formats_are_named_and_not_skipped(number: Any, tmp_path: Path) -> None:
    at = saved(tmp_path, 2)
    edited(at / "manifest.json", format=number)
    told = str(load(tmp_path))
    assert f"manifest.json of state-00002 has format {number!r}, but must have 1; load it" in told
    manifest = json.loads((at / "manifest.json").read_text())
    del manifest["format"]
    (at / "manifest.json").write_text(json.dumps(manifest))
    assert "has format None, but must have 1" in str(load(tmp_path))


def test_states_of_other_models_are_refused_and_not_skipped(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    others = new_ranks(2, "letters")
    raised = on_all(others, lambda other: load_state(tmp_path, only=[other]))
    assert "letters cannot be restored: numbers were saved" in message(raised)
    assert not any(other.arrays for other in others)


def test_there_must_be_a_checkpoint(tmp_path: Path) -> None:
    assert "manifest.json is missing, and" in str(load(tmp_path))
    assert f"the directory {tmp_path / 'nowhere'} is missing" in str(load(tmp_path / "nowhere"))


@pytest.mark.parametrize("key", ["exchanges", "files", "ranks", "owner", "step"])
def test_manifests_need_what_is_read(key: str, tmp_path: Path) -> None:
    at = saved(tmp_path, 1)
    manifest = checkpoint_files.read_manifest(at)
    del manifest[key]
    signed = manifest | {"checksum": checkpoint_files._checksum(manifest)}
    (at / "manifest.json").write_text(json.dumps(signed))
    assert f"manifest.json has no '{key}'" in str(load(tmp_path))


def test_an_unexpected_failure_is_no_hang(tmp_path: Path) -> None:
    """If loading fails on one rank with an unexpected error, all ranks raise an error."""
    edited_and_signed(saved(tmp_path, 1), files=[3, 3])
    assert "TypeError" in str(load(tmp_path))


def test_spent_privacy_is_not_forgotten(tmp_path: Path) -> None:
    for number in (1, 2):
        savers = new_ranks(2)
        for saver in savers:
            saver.arrays, saver.steps = {"x": np.zeros(1)}, number
            saver.policy = {"privacy": {"releases": []}}
        assert not any(on_all(savers, lambda saver: save_state(tmp_path, only=[saver])))
    newest = tmp_path / "state-00002"
    kept = (newest / RANK_1).read_bytes()
    os.truncate(newest / RANK_1, 10)
    told = str(load(tmp_path))
    assert "state-00001, saved after step 1, lacks the privacy spent since" in told
    assert "10 bytes" in told and "remove the newer one" in told
    (newest / RANK_1).write_bytes(kept)
    (newest / "manifest.json").unlink()  # `save_state` has not returned
    loaders = new_ranks(2)
    assert not any(on_all(loaders, lambda loader: load_state(tmp_path, only=[loader])))
    assert loaders[0].steps == 1


class Pickled:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "unpickled"
    (saver,) = new_ranks(1)
    saver.arrays = {"x": np.array([Pickled(trap)], object)}
    assert not any(on_all([saver], lambda saver: save_state(tmp_path, only=[saver])))
    assert "allow_pickle=False" in str(load(tmp_path, 1))
    assert not trap.exists()


# -------------------------------------------------------------------------------- any one change
KINDS = ("byte", "bit", "cut", "longer", "gone", "zeros", "another")


def damage_at_random(random: random.Random, folder: Path) -> None:
    """Damage one file of a folder at random."""
    path = random.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    kind = random.choice(KINDS)
    if kind == "gone":
        path.unlink()
    elif kind == "bit":
        at = random.randrange(len(content))
        changed(path, at, content[at] ^ 1 << random.randrange(8))
    elif kind == "byte":
        changed(path, random.randrange(len(content)), random.choice(b"0123456789 \0\xff"))
    elif kind == "cut":
        os.truncate(path, random.randrange(len(content)))
    elif kind == "longer":
        path.write_bytes(content + random.randbytes(random.randint(1, 20)))
    elif kind == "zeros":
        path.write_bytes(bytes(len(content)))
    else:
        path.write_bytes(random.choice(sorted(folder.iterdir())).read_bytes())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    saved(folder, 2)
    return folder


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2]))
def test_after_any_change_a_true_state_is_loaded_or_none(
    two: Path, random: random.Random, which: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "copy")
        shutil.copytree(two, folder)
        damage_at_random(random, folder / f"state-{which:05d}")
        found = load(folder)  # checks the arrays
    assert found == 2 or which == 2 and (found == 1 or isinstance(found, str)), found


# ------------------------------------------------------------------------------------- full disks
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system of 128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield folder
    finally:
        checkpoint_files.release()
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_nothing_is_lost(small_disk: Path) -> None:
    assert not any(save(small_disk, 1))
    told = message(save(small_disk, 2, size=12_000))
    assert told.startswith(f"state: writing to {small_disk} failed on rank ")
    assert re.search(r"rank-0000\d-of-00002.npz \(96\d+ bytes\) cannot be written: No space", told)
    assert names(small_disk) == ["state-00001"]
    assert load(small_disk) == 1
    assert not any(save(small_disk, 3)) and load(small_disk) == 3


FAULTS = [errno.ENOSPC, errno.EIO]
ways = pytest.mark.parametrize(
    ("ranks", "lasting"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.nightly)]
)


@ways
@pytest.mark.parametrize("fault", FAULTS, ids=errno.errorcode.get)
def test_any_operation_may_fail(ranks: int, lasting: bool, fault: int, tmp_path: Path) -> None:
    """If the n-th file operation fails, or all from it on, all ranks raise one sentence.

    The last checkpoint is complete, which is the new one or the one before, and no temporary file
    is left once the disk is whole again.
    """
    for number in range(1, 100):
        folder = tmp_path / str(number)
        assert not any(save(folder, 1, ranks))
        checkpoint_files.release()
        failing, left = keepers.failing(number, fault, lasting)
        with failing:
            raised = save(folder, 2, ranks)
        if left() > 0:
            assert number > 20
            return
        told = message(raised) if any(raised) else ""
        assert not told or told.startswith(f"state: writing to {folder} failed on rank ")
        assert os.strerror(fault) in told or not told
        found = load(folder, ranks)
        assert found == 2 if not told else found in (1, 2)
        assert lasting or not list(folder.rglob("*.part"))
        assert not any(save(folder, 3, ranks)) and load(folder, ranks) == 3
        assert not list(folder.rglob("*.part")) and len(names(folder)) == 2
    raise AssertionError("there are more operations than were tried")


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Files are made anew: a link in their place does not lead to another file."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "x.part").symlink_to(victim)
    checkpoint_files.write_whole(tmp_path / "x", b"content", durable=True)
    assert (tmp_path / "x").read_bytes() == b"content" and victim.read_text() == "kept"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / checkpoint_files.LOCK).symlink_to(victim)
    assert os.strerror(errno.ELOOP) in message(save(folder, 1)) and victim.read_text() == "kept"


def test_short_writes_are_continued(tmp_path: Path) -> None:
    real = os.write
    with mock.patch.object(os, "write", lambda descriptor, x: real(descriptor, x[:7])):
        assert not any(save(tmp_path, 1))
    assert load(tmp_path) == 1


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    assert "File exists" in message(save(tmp_path / "file", 1))
    assert (tmp_path / "file").read_text() == "kept"


# ---------------------------------------------------------------------- two jobs, and their steps
def test_another_job_is_refused_until_the_first_one_ends(tmp_path: Path) -> None:
    assert not any(save(tmp_path, 1))
    checkpoint_files.release()
    other = os.open(tmp_path / checkpoint_files.LOCK, os.O_RDWR)  # as in another process
    fcntl.flock(other, fcntl.LOCK_EX)
    os.ftruncate(other, 0)
    os.write(other, b"job 7 (process 12 on a1)")
    before = len(os.listdir("/proc/self/fd"))
    told = message(save(tmp_path, 2))
    assert len(os.listdir("/proc/self/fd")) == before
    assert told == (
        f"state: writing to {tmp_path} failed on rank 0: job 7 (process 12 on a1) saves to this "
        "directory, too; give each job a directory of its own."
    )
    assert names(tmp_path) == ["state-00001"] and load(tmp_path) == 1
    os.close(other)  # which ends with its process
    assert not any(save(tmp_path, 2)) and load(tmp_path) == 2


def test_without_locks_the_owner_of_the_newest_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert not any(save(tmp_path, 1, 1))
    first = checkpoint_files._claim
    checkpoint_files.release()  # as in another process
    assert not any(save(tmp_path, 2, 1))
    second, checkpoint_files._claim = checkpoint_files._claim, first
    told = message(save(tmp_path, 3, 1))
    assert second is not None and first is not None and first.owner != second.owner
    assert f"failed on rank 0: {second.owner} has saved to this directory, too" in told
    checkpoint_files._claim = second
    assert not any(save(tmp_path, 3, 1)) and load(tmp_path, 1) == 3


def test_a_job_whose_first_rank_changes_keeps_its_directory(tmp_path: Path) -> None:
    assert not any(save(tmp_path, 1))
    owner = checkpoint_files._claim.owner  # type: ignore[union-attr]
    assert checkpoint_files.claimed(tmp_path, leads=False) == owner
    checkpoint_files.release()
    checkpoint_files.follow(tmp_path, owner)
    assert not any(save(tmp_path, 2))
    assert checkpoint_files.read_manifest(tmp_path / "state-00002")["owner"] == owner


def test_forked_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    assert not any(save(tmp_path, 1))
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        checkpoint_files.release()
        assert not any(save(tmp_path, 2))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(("step", "found"), [(None, 5), (0, 0), (70, 70)])
def test_a_state_is_loaded_with_its_step(step: int | None, found: int, tmp_path: Path) -> None:
    savers, loaders, steps = new_ranks(2), new_ranks(2), list[int]()
    for saver in savers:
        saver.arrays, saver.steps = {"x": np.zeros(1)}, 5

    def saving(saver: keepers.Numbers) -> None:
        steps.append(save_state(tmp_path, only=[saver], step=step))

    def loading(loader: keepers.Numbers) -> None:
        steps.append(load_state(tmp_path, only=[loader]))

    assert not any(on_all(savers, saving)) and not any(on_all(loaders, loading))
    assert steps == [found] * 4


def test_steps_that_differ_are_refused(tmp_path: Path) -> None:
    savers = new_ranks(2)
    saving = lambda saver: save_state(tmp_path, only=[saver], step=saver.communicator.rank)  # noqa: E731
    told = message(on_all(savers, saving))
    assert "step is [0, 1] on ranks 0, 1, ..., but must be equal on all" in told
    wrong = on_all(savers, lambda saver: save_state(tmp_path, only=[saver], step=-1))
    assert "step is -1, but must be an integer of at least 0" in message(wrong)
    assert not names(tmp_path)


# ---------------------------------------------------------------------------------------- crashes
def test_killed_in_any_operation(tmp_path: Path) -> None:
    """A process that is killed while it saves leaves files that the next save removes."""
    for number in range(1, 100):
        folder = tmp_path / str(number)
        assert not any(save(folder, 1, 1)) and not any(save(folder, 1, 1))
        checkpoint_files.release()
        command = [sys.executable, keepers.__file__, str(folder), str(number)]
        path = os.pathsep.join(sys.path)
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path})
        if done.returncode == 0:
            assert number > 10
            return
        assert done.returncode == -signal.SIGKILL
        assert load(folder, 1) in (1, 2)
        assert not any(save(folder, 3, 1)) and load(folder, 1) == 3
        assert [names(folder / x) for x in names(folder)] == [ALONE, ALONE]
    raise AssertionError("there are more operations than were tried")


ALONE = ["manifest.json", "rank-00000-of-00001.npz"]


class Disk:
    """Model of a disk's contents after a power loss: all flushed data, and any part of the rest.

    `keepers.counted` reports the operations. Changes of a directory are on the disk once the
    directory is flushed, and data of a file once the file is.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple[Any, ...]] = []
        self._files: dict[Path, int] = {}
        self._count = 0
        self._lock = threading.RLock()  # ranks are threads
        for path in sorted(root.rglob("*")):
            self("mkdir" if path.is_dir() else "create", (path,))
            if path.is_file():
                self.log += [("data", self._files[path], path.read_bytes())]
                self.log += [("sync", self._files[path])]
            self.log += [("sync", path.parent)]

    def __call__(self, name: str, about: Any) -> None:
        with self._lock:
            self._hear(name, about)

    def _hear(self, name: str, about: Any) -> None:
        if name == "create":
            self._count += 1
            self._files[about[0]] = self._count
            self.log.append(("entry", about[0].parent, None, about[0], self._count))
        elif name == "mkdir":
            self.log.append(("entry", about[0].parent, None, about[0], 0))
        elif name == "write":
            path = Path(os.readlink(f"/proc/self/fd/{about[0]}"))
            if path in self._files:
                self.log.append(("data", self._files[path], bytes(about[1])))
        elif name == "replace":
            number = self._files[about[1]] = self._files.pop(about[0])
            self.log.append(("entry", about[0].parent, *about, number))
        elif name in ("unlink", "rmdir") and about[0].exists():
            self.log.append(("entry", about[0].parent, about[0], None, 0))
        elif name == "fsync":
            path = Path(os.readlink(f"/proc/self/fd/{about[0]}"))
            self.log.append(("sync", path if path.is_dir() else self._files[path]))

    def after_loss(self, at: int, random: random.Random, into: Path) -> None:
        """Write possible contents of the disk if power is lost after `at` events."""
        events, there = self.log[:at], {}
        content: dict[int, bytes] = {}
        share = random.random()
        for i, (kind, about, *more) in enumerate(events):
            forced = ("sync", about) in events[i:]
            if kind == "data":
                (data,) = more
                content[about] = data if forced else data[: random.randint(0, len(data))]
            elif kind == "entry" and (forced or random.random() < share):
                before, after, number = more
                there.pop(before, None)
                there |= {after: number} if after else {}
        into.mkdir()
        for path, number in sorted(there.items()):
            place = into / path.relative_to(self.root)
            if place.parent.is_dir():
                place.write_bytes(content.get(number, b"")) if number else place.mkdir()


@functools.cache
def recorded() -> tuple[Disk, list[int]]:
    """Return the disk after three saves beside an earlier one, and its event counts."""
    root = Path(tempfile.mkdtemp()).resolve()
    saved(root, 1)
    disk = Disk(root)
    ends = [len(disk.log)]
    for number in (2, 3, 4):
        with keepers.counted(disk):
            assert not any(save(root, number))
        ends.append(len(disk.log))
    shutil.rmtree(root)
    return disk, ends


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False))
def test_power_is_lost_at_any_moment(random: random.Random) -> None:
    disk, ends = recorded()
    at = random.randint(ends[0], len(disk.log))
    last = max(number for number, end in enumerate(ends, 1) if end <= at)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "disk")
        disk.after_loss(at, random, folder)
        assert load(folder) in (last, last + 1)
        assert not any(save(folder, 9)) and load(folder) == 9


def test_files_are_checked_before_the_manifest_is_written(tmp_path: Path) -> None:
    """Rank 0 looks for all ranks' files first; without a shared file system they are missing."""
    with pytest.raises(checkpoint_files.Damaged, match=r"ranks \[0, 1\] of 2 are missing"):
        checkpoint_files.write_manifest(tmp_path, {"ranks": 2, "files": [], "exchanges": []})
    assert names(tmp_path) == []


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    path = checkpoint_files.rank_file(tmp_path, 0, 1)
    np.savez(path, **{str(size): np.zeros(size) for size in range(10)})

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:  # in any allocation, even of `ast`
            time.sleep(0)

    def read(_: Any) -> None:
        for _ in range(20):
            Garbage()
            checkpoint_files.read_arrays(path, "")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        problems = on_all(new_ranks(4), read)
    finally:
        sys.setswitchinterval(interval)
    assert problems == [None] * 4
