"""Local copies, downloads and the cache of decoded arrays."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

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
    """Hold a lock that one process of a host can hold at a time."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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

    Args:
        url: address of the file.
        md5: MD5 sum of the file; None if none is published.
        what: description of the file, for messages.
        instead: alternative that the message suggests if the download fails.

    Raises:
        DataError: if the download fails, or the file has another MD5 sum.
    """
    target = cache_folder() / url.rpartition("/")[2]
    with locked(target.name):
        if target.exists():
            return target
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            digest = _download(url, part)
            if md5 is not None and digest != md5:
                raise DataError(
                    f"data: {url} has the MD5 sum {digest}, but must have {md5}; it is incomplete "
                    "or has changed. Try again, or set ACCORDION_DATA to a folder with a good copy."
                )
            part.replace(target)
        except (OSError, urllib.error.URLError) as error:
            reason = getattr(error, "reason", error)
            where = os.environ.get("ACCORDION_DATA")
            looked = f" is not in ACCORDION_DATA ({where}) and" if where else ""
            raise DataError(
                f"data: {what}{looked} could not be fetched from {url} ({reason}); set "
                f"ACCORDION_DATA to a folder with a copy{instead}."
            ) from None
        finally:
            part.unlink(missing_ok=True)
    return target


def _download(url: str, target: Path) -> str:
    """Download a file and return its MD5 sum."""
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=30) as answer, open(target, "wb") as file:
        while block := answer.read(1 << 20):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()
