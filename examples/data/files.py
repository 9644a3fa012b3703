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
"""Of the cached arrays: a change makes old ones unused."""

Splits = tuple[Split, Split]


def folders(*names: str) -> list[Path]:
    """Where a set may lie: ACCORDION_DATA itself and its subfolders of these names.

    Raises:
        DataError: ACCORDION_DATA is no folder.
    """
    text = os.environ.get("ACCORDION_DATA")
    if not text:
        return []
    root = Path(text).expanduser()
    if not root.is_dir():
        raise DataError(f"data: ACCORDION_DATA is {text!r}, but must be a folder that exists.")
    return [path for path in (root, *(root / name for name in names)) if path.is_dir()]


def cache_folder() -> Path:
    """Where arrays and downloads are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "accordion-hvd"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Only one process of a machine at a time; the others wait."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached(name: str, sources: Sequence[Path], decode: Callable[[], Splits]) -> Splits:
    """What `decode` returns, decoded once for all ranks and runs.

    The arrays appear under their final name only when they are whole. They are mapped into
    memory, so that the ranks of a machine share them.

    Args:
        name: of the set.
        sources: files that it is decoded from; others, or newer ones, are decoded anew.
        decode: reads them.
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
                np.load(place / f"{kind}-images.npy", mmap_mode="r"),
                np.load(place / f"{kind}-labels.npy"),
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
    """The file at `url`, downloaded once into the cache.

    Args:
        url: where it is.
        md5: what its MD5 sum must be; None where nobody has published one.
        what: it is, in words.
        instead: what else one can do where it cannot be had.

    Raises:
        DataError: it cannot be had, or is not what it should be.
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
                    f"data: {url} has the MD5 sum {digest}, but must have {md5}; it was cut short "
                    "or changed. Try again, or set ACCORDION_DATA to a folder with a good copy."
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
    """Returns the MD5 sum."""
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=30) as answer, open(target, "wb") as file:
        while block := answer.read(1 << 20):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()
