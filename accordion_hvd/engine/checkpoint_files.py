"""The files of checkpoints, which are written whole or not at all.

A directory has the last two checkpoints, each in its own folder (`state-00001`, `state-00002`, ...)
with one file per rank and `manifest.json`. Every file is written under another name, forced to the
disk and renamed. The manifest, which has the files' sizes and checksums, comes last: a folder
without it was not written to its end.

The first rank of a job holds a lock on the directory's file `lock` as long as its process lives.
Where the file system has no locks, the owner in the newest manifest shows that another job saves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import socket
import threading
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"
LOCK = "lock"
_KEPT = 2  # if the newest is damaged, `load_state` takes the one before
_FOLDER = re.compile(r"state-(\d{5,})")
_CHUNK = 1 << 20
_MOST_NAMED = 10  # missing files in a message
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC  # through no link
_PARSING = threading.Lock()  # `ast`, which reads headers, may fail in two threads (Python 3.11.7)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


class Damaged(ValueError):
    """Raised if a checkpoint is incomplete or has changed; the message has the reason."""


def rank_file(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"rank-{rank:05d}-of-{ranks:05d}.npz"


def folders(directory: Path) -> list[Path]:
    """Return the folders of a directory's checkpoints, newest first, even of incomplete ones.

    The last is the directory itself if it is such a folder.
    """
    return _numbered(directory) + [directory] * (directory / MANIFEST).exists()


def _numbered(directory: Path) -> list[Path]:
    numbers = {p: int(m[1]) for p in directory.iterdir() if (m := _FOLDER.fullmatch(p.name))}
    return sorted(numbers, key=numbers.__getitem__, reverse=True)


# ------------------------------------------------------------------------------------------ writing
def new_folder(directory: Path) -> Path:
    make_directory(directory)
    present = _numbered(directory)
    for folder in present:
        if not (folder / MANIFEST).exists():  # left by a crash
            remove(folder)
    newest = int(present[0].name.removeprefix("state-")) if present else 0
    folder = directory / f"state-{newest + 1:05d}"
    folder.mkdir()
    sync_directory(directory)  # else a crash may lose the folder with the files in it
    return folder


def make_directory(path: Path) -> None:
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_file(path: Path, content: bytes | memoryview) -> dict[str, Any]:
    """Write a file durably, whole or not at all, and return its row in the manifest."""
    write_whole(path, content, durable=True)
    return {"bytes": len(content), "blake2b": _digest([content])}


def write_whole(path: Path, content: bytes | memoryview, *, durable: bool) -> None:
    """Write a file, whole or not at all, and force it to the disk if `durable`.

    The content is first written to a new file beside it: to none that exists, and through no link.

    Raises:
        OSError: if that fails; there is no new file then, and the old one is as it was, unless only
            the directory could not be forced to the disk.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)  # left by a crash
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]  # it may write a part only
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:  # of a full disk, it names neither the file nor its size
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        reason = error.strerror or error
        raise OSError(f"{path.name} ({len(content)} bytes) cannot be written: {reason}") from error


def sync_directory(path: Path) -> None:
    """Force a directory's entries to the disk, on file systems that support it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    manifest = json.loads(json.dumps({"format": FORMAT, **manifest}))  # as it will be read
    check_sizes(folder, manifest)  # before the manifest makes the files count
    signed = {**manifest, "checksum": _checksum(manifest)}
    write_file(folder / MANIFEST, json.dumps(signed, indent=1).encode())


def remove_old(directory: Path) -> None:
    complete = 0
    for folder in _numbered(directory):
        if complete == _KEPT:
            remove(folder)
        else:
            # Damaged ones do not count: two that can be loaded are kept.
            complete += _is_complete(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint as far as possible; the next `new_folder` removes what is left."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)  # first: without it, nobody reads the rest
        for path in [*folder.glob("rank-*-of-*.npz*"), folder / f"{MANIFEST}.part"]:
            path.unlink(missing_ok=True)
        folder.rmdir()


# ------------------------------------------------------------------------------------------- owners
class Claim(NamedTuple):
    """The directory to which this process's job saves.

    Attributes:
        owner: name of the job.
        before: owner of the newest checkpoint when this rank claimed the directory, "" if there was
            none; None if another rank did.
        lock: descriptor of the locked file; None if another rank holds it, or nobody can.
    """

    directory: Path
    owner: str
    before: str | None = None
    lock: int | None = None


_claim: Claim | None = None  # the last one


def claimed(directory: Path, leads: bool) -> str | None:
    """Return the name under which this rank's job has claimed a directory; None if it has not.

    Ranks that do not lead, but did once, release the lock.
    """
    if _claim is None or _claim.directory != directory.absolute():
        return None
    owner = _claim.owner
    if not leads:
        follow(directory, owner)
    return owner


def claim(directory: Path, owner: str | None) -> str:
    """Claim a directory for this job, until this process ends or saves elsewhere.

    Args:
        owner: name under which the job has claimed it before; None if it has not.

    Returns:
        The name of the job.

    Raises:
        ValueError: if another job has claimed the directory, or has saved there since.
    """
    global _claim
    make_directory(directory)
    place, mine = directory.absolute(), _claim
    newest = next(filter(None, map(_owner_of, _numbered(directory))), "")
    if mine is not None and mine.directory == place and mine.before is not None:
        if newest not in ("", mine.owner, mine.before):
            raise ValueError(_refusal(newest, "has saved"))
        if mine.lock is None or os.fstat(mine.lock).st_nlink:  # nobody has removed the file
            return mine.owner
    release()
    name = f"job {secrets.token_hex(4)} (process {os.getpid()} on {socket.gethostname()})"
    _claim = Claim(place, owner or name, newest, _locked(place / LOCK, owner or name))
    return _claim.owner


def follow(directory: Path, owner: str) -> None:
    """Remember the owner of a directory, on a rank that does not lead."""
    global _claim
    release()
    _claim = Claim(directory.absolute(), owner)


def _locked(path: Path, owner: str) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, owner.encode())
    except BlockingIOError:
        other = os.read(descriptor, 200).decode(errors="replace")
        os.close(descriptor)
        raise ValueError(_refusal(other or "another job", "saves")) from None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return descriptor


def _refusal(other: str, does: str) -> str:
    return f"{other} {does} to this directory, too; give each job a directory of its own"


def _owner_of(folder: Path) -> str | None:
    try:
        return str(read_manifest(folder)["owner"])
    except (OSError, ValueError):
        return None


def release() -> None:
    """End the claim: another process may save there. In a forked child, the parent's lock stays."""
    global _claim
    before, _claim = _claim, None
    if before is not None and before.lock is not None:
        with contextlib.suppress(OSError):
            os.close(before.lock)


os.register_at_fork(after_in_child=release)


# ------------------------------------------------------------------------------------------ reading
def survey(directory: Path) -> list[tuple[str, bool]]:
    """Return where in the directory checkpoints are, newest first, and whether each has a manifest.

    Raises:
        FileNotFoundError: if the directory is missing.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"the directory {directory} is missing")
    return [
        (str(folder.relative_to(directory)), (folder / MANIFEST).exists())
        for folder in folders(directory)
    ]


def examine(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the manifest, and why the checkpoint cannot be used or an empty string.

    Raises:
        ValueError: if the manifest has another format.
    """
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except (OSError, Damaged) as error:
        return manifest, str(error)
    return manifest, ""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        Damaged: if the manifest has changed.
        ValueError: if the manifest has another format.
    """
    manifest = parsed((folder / MANIFEST).read_bytes(), MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{MANIFEST} of {folder.name} has format {manifest.get('format')!r}, but must have "
            f"{FORMAT}; load it with the version of accordion_hvd that wrote it, or remove it and "
            "start compression anew"
        )
    stated, found = manifest.pop("checksum", None), _checksum(manifest)
    if stated != found:
        raise Damaged(f"{MANIFEST} has changed: its checksum is {found}, but was {stated}")
    if missing := {"ranks", "exchanges", "files", "owner", "step"} - manifest.keys():
        raise Damaged(f"{MANIFEST} has no {sorted(missing)[0]!r}")
    for key, least in (("ranks", 1), ("step", 0)):
        if (value := manifest[key]) is True or not isinstance(value, int) or value < least:
            wanted = f"an integer of at least {least}"
            raise Damaged(f"{MANIFEST} has {key} {value!r}, but must have {wanted}")
    return manifest


def parsed(content: bytes, name: str) -> dict[str, Any]:
    """Return the object that JSON contains; Damaged, which names it as `name`, if there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # the latter if it is nested too deeply
        raise Damaged(f"{name} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise Damaged(f"{name} has a {type(found).__name__}, but must have an object")
    return found


def read_arrays(path: Path, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays of a rank's file whose names begin with `prefix`, by the rest of the name.

    Arrays that would take more memory than the file has bytes are refused before they are read.

    Raises:
        Damaged: if a size is wrong.
        ValueError: if an array has objects, whose pickles are never loaded.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            rows = archive.infolist()
            total = sum(row.file_size for row in rows)
            if total > path.stat().st_size or any(row.compress_type for row in rows):
                raise Damaged(f"{path.name} has arrays of {total} bytes, which is more than it has")
            wanted = [row for row in rows if row.filename.startswith(prefix)]
            return {
                row.filename.removeprefix(prefix).removesuffix(".npy"): _array(archive, row)
                for row in wanted
            }
    except zipfile.BadZipFile as error:
        raise Damaged(f"{path.name} cannot be read ({error})") from error


def _array(archive: zipfile.ZipFile, row: zipfile.ZipInfo) -> np.ndarray:
    with _PARSING, archive.open(row) as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise Damaged(f"array {row.filename} has format {version}, but must have (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        size = math.prod(shape) * dtype.itemsize
        if size != row.file_size - file.tell() and not dtype.hasobject:
            raise Damaged(f"array {row.filename} of {size} bytes is not whole")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise Damaged unless all ranks' files are there, with the sizes of the manifest."""
    ranks = manifest["ranks"]
    missing = (rank for rank in range(ranks) if not rank_file(folder, rank, ranks).exists())
    some = list(itertools.islice(missing, _MOST_NAMED + 1))  # a wrong `ranks` may be any number
    if some:
        more = ", ..." if len(some) > _MOST_NAMED else ""
        named = ", ".join(map(str, some[:_MOST_NAMED])) + more
        raise Damaged(f"the files of ranks [{named}] of {ranks} are missing")
    paths = (rank_file(folder, rank, ranks) for rank in range(ranks))
    for path, row in zip(paths, manifest["files"], strict=False):
        size = path.stat().st_size
        if size != row["bytes"]:
            raise Damaged(f"{path.name} has {size} bytes, but must have {row['bytes']}")


def problem_of(folder: Path, manifest: dict[str, Any], ranks: Iterable[int]) -> str:
    """Return why these ranks' files cannot be used, or an empty string."""
    for rank in ranks:
        path = rank_file(folder, rank, manifest["ranks"])
        try:
            with open(path, "rb") as file:
                found = _digest(iter(functools.partial(file.read, _CHUNK), b""))
        except OSError as error:
            return str(error)
        stated = manifest["files"][rank]["blake2b"]
        if found != stated:
            return f"{path.name} has changed: its checksum is {found}, but was {stated}"
    return ""


def _is_complete(folder: Path) -> bool:
    try:
        check_sizes(folder, read_manifest(folder))
    except (OSError, ValueError):
        return False
    return True


def _checksum(manifest: dict[str, Any]) -> str:
    return _digest([json.dumps(manifest, sort_keys=True).encode()])


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
