"""The files of checkpoints, which are written whole or not at all.

A directory has the last two checkpoints, each in its own folder (`state-00001`, `state-00002`, ...)
with one file per rank and `manifest.json`. Every file is written under another name, forced to the
disk and renamed. The manifest, which has the files' sizes and checksums, comes last: a folder
without it was not written to its end.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
_KEPT = 2
_FOLDER = re.compile(r"state-(\d{5,})")
_CHUNK = 1 << 20
_MOST_NAMED = 10  # missing files in a message


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
    """Make the folder of the next checkpoint, after the removal of incomplete ones."""
    make_directory(directory)
    present = _numbered(directory)
    for folder in present:
        if not (folder / MANIFEST).exists():  # left by a crash
            remove(folder)
    newest = int(present[0].name.removeprefix("state-")) if present else 0
    folder = directory / f"state-{newest + 1:05d}"
    folder.mkdir()
    sync_directory(directory)
    return folder


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, durably."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_file(path: Path, content: bytes | memoryview) -> dict[str, Any]:
    """Write a file durably, whole or not at all, and return its row in the manifest."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)
    except OSError as error:  # of a full disk, it names neither the file nor its size
        reason = error.strerror or error
        raise OSError(f"{path.name} ({len(content)} bytes) cannot be written: {reason}") from error
    return {"bytes": len(content), "blake2b": _digest([content])}


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
    """Complete a checkpoint, if all of its files are there."""
    manifest = json.loads(json.dumps({"format": FORMAT, **manifest}))  # as it will be read
    check_sizes(folder, manifest)
    signed = {**manifest, "checksum": _checksum(manifest)}
    write_file(folder / MANIFEST, json.dumps(signed, indent=1).encode())


def remove_old(directory: Path) -> None:
    """Remove the checkpoints before the last two complete ones."""
    complete = 0
    for folder in _numbered(directory):
        if complete == _KEPT:
            remove(folder)
        else:
            complete += _is_complete(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint as far as possible; the next `new_folder` removes what is left."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)  # first: without it, nobody reads the rest
        for path in [*folder.glob("rank-*-of-*.npz*"), folder / f"{MANIFEST}.part"]:
            path.unlink(missing_ok=True)
        folder.rmdir()


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
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except ValueError as error:
        raise Damaged(f"{MANIFEST} is not JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise Damaged(f"{MANIFEST} has a {type(manifest).__name__}, but must have an object")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{MANIFEST} of {folder.name} has format {manifest.get('format')!r}, but must have "
            f"{FORMAT}; load it with the version of accordion_hvd that wrote it, or remove it and "
            "start compression anew"
        )
    stated, found = manifest.pop("checksum", None), _checksum(manifest)
    if stated != found:
        raise Damaged(f"{MANIFEST} has changed: its checksum is {found}, but was {stated}")
    if missing := {"ranks", "exchanges", "files"} - manifest.keys():
        raise Damaged(f"{MANIFEST} has no {sorted(missing)[0]!r}")
    if (ranks := manifest["ranks"]) is True or not isinstance(ranks, int) or ranks < 1:
        raise Damaged(f"{MANIFEST} has ranks {ranks!r}, but must have an integer of at least 1")
    return manifest


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
