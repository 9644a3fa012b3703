"""Local copies, downloads and the cache of decoded arrays."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock
import numpy as np
import pooch

from examples.data.base import DataError, Split

FORMAT = 1
"""Format of the cached arrays; caches of another format are not used."""

Splits = tuple[Split, Split]


def folders(*names: str) -> list[Path]:
    """Return the folders to search: ACCORDION_DATA and its subfolders with these names.

    Raises:
        DataError: if ACCORDION_DATA is not a folder.
    """
    text = os.environ.get("ACCORDION_DATA")
    if not text:
        return []
    root = Path(text).expanduser()
    if not root.is_dir():
        raise DataError(f"data: ACCORDION_DATA is {text!r}, but must be a folder that exists.")
    return [path for path in (root, *(root / name for name in names)) if path.is_dir()]


def cache_folder() -> Path:
    """Return the folder for arrays and downloads."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "accordion-hvd"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock that one process of a host can hold at a time.

    Raises:
        DataError: if the cache cannot be written.
    """
    folder = cache_folder()
    lock = filelock.FileLock(folder / f"{name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise DataError(
            f"data: the cache {folder} cannot be written ({_reason(error)}); set XDG_CACHE_HOME to "
            "a folder that can."
        ) from None
    try:
        yield
    finally:
        lock.release()


def cached(name: str, sources: Sequence[Path], decode: Callable[[], Splits]) -> Splits:
    """Return the result of `decode`, which runs once for all ranks and runs.

    The arrays get their final name only when they are complete. They are mapped into memory, so
    the ranks of a host share them.

    Args:
        name: name of the set.
        sources: source files; if the files change, they are decoded again.
        decode: function that reads the files.
    """
    place = cache_folder() / f"{name}-{_fingerprint(sources)}"
    with locked(name):
        found = _mapped(place)
        if found is None:
            splits = decode()
            part = Path(tempfile.mkdtemp(prefix=f"{place.name}.part.", dir=place.parent))
            try:
                for kind, split in zip(("train", "test"), splits, strict=True):
                    np.save(part / f"{kind}-images.npy", split.images)
                    np.save(part / f"{kind}-labels.npy", split.labels)
                shutil.rmtree(place, ignore_errors=True)
                part.rename(place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            found = _mapped(place) or splits
    return found


def _mapped(place: Path) -> Splits | None:
    try:
        train, test = (
            Split(
                np.load(place / f"{kind}-images.npy", mmap_mode="r", allow_pickle=False),
                np.load(place / f"{kind}-labels.npy", allow_pickle=False),
            )
            for kind in ("train", "test")
        )
    except (OSError, ValueError, EOFError):
        return None
    return train, test


def _fingerprint(sources: Sequence[Path]) -> str:
    rows = []
    for path in sources:
        stat = path.stat()
        rows.append((str(path.resolve()), stat.st_size, stat.st_mtime_ns))
    return hashlib.blake2b(repr((FORMAT, rows)).encode(), digest_size=8).hexdigest()


INSTEAD = ", or use --data digits, which needs none"


def fetched(url: str, md5: str | None, what: str, instead: str = INSTEAD) -> Path:
    """Return the path of the file at `url`, which is downloaded once into the cache.

    A file in the cache with another MD5 sum is downloaded again.

    Args:
        url: address of the file.
        md5: MD5 sum of the file; None if none is published.
        what: description of the file, for messages.
        instead: alternative that the message suggests if the download fails.

    Raises:
        DataError: if the download fails, or the file has another MD5 sum.
    """
    name, known = url.rpartition("/")[2], md5 and f"md5:{md5}"
    pooch.get_logger().setLevel("WARNING")  # the progress bar is enough
    download = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=30)
    with locked(name):
        try:
            return Path(pooch.retrieve(url, known, name, cache_folder(), downloader=download))
        except ValueError as error:
            wrong = str(error).partition(". ")[0]  # with both sums
            raise DataError(
                f"data: {url} is incomplete or has changed ({wrong}). Try again, or set "
                "ACCORDION_DATA to a folder with a good copy."
            ) from None
        except OSError as error:
            where = os.environ.get("ACCORDION_DATA")
            looked = f" is not in ACCORDION_DATA ({where}) and" if where else ""
            raise DataError(
                f"data: {what}{looked} could not be fetched from {url} ({_reason(error)}); set "
                f"ACCORDION_DATA to a folder with a copy{instead}."
            ) from None


def _reason(error: BaseException) -> str:
    """Describe the first of a chain of errors, such as the failed look-up of a host's name."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error)
