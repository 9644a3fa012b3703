"""Texts: Tiny Shakespeare (Karpathy, 2015), and the smaller parts of WikiText-2 (Merity, 2017)."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.data import files
from examples.data.base import Array, DataError

SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
WIKITEXT = "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip"
WIKITEXT_MD5 = "542ccefacc6c27f945fb54453812b3cd"
PARTS = {
    "valid": "d756d22ab2310e7e60c094bea5c5a8eb",
    "test": "781c9418ab9414bd09e4aad825aae752",
}
"""Name of a part of WikiText-2 -> its MD5 sum."""

PART = 0.9
"""Fraction of the text, from its beginning, for training."""


@dataclass(frozen=True)
class Text:
    """Characters as numbers.

    Attributes:
        train, test: indices into `alphabet`, int64.
        alphabet: all characters of the text, sorted.
    """

    train: Array
    test: Array
    alphabet: str


def load_tinyshakespeare() -> Text:
    """Load the text: the first nine tenths for training, the rest for testing.

    Raises:
        DataError: if the download fails, or the file has another MD5 sum.
    """
    path = _local("tinyshakespeare/input.txt", "tinyshakespeare.txt") or files.fetched(
        SOURCE, MD5, "Tiny Shakespeare", instead=""
    )
    content = path.read_bytes()
    _check(content, path, "Tiny Shakespeare", MD5)
    characters, codes = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
    cut = int(PART * len(codes))
    return Text(codes[:cut], codes[cut:], bytes(characters).decode("ascii"))


def load_wikitext2() -> Array:
    """Load the bytes (uint8) of the validation and the test part of WikiText-2, as tokens.

    Raises:
        DataError: if the download fails, or a part has another MD5 sum.
    """
    contents = []
    for part, md5 in PARTS.items():
        path = _local(f"wikitext2/{part}.txt", f"wikitext-2/wiki.{part}.tokens")
        if path is None:
            path = files.fetched(WIKITEXT, WIKITEXT_MD5, "WikiText-2", instead="")
            with zipfile.ZipFile(path) as archive:
                contents.append(archive.read(f"wikitext-2/wiki.{part}.tokens"))
        else:
            contents.append(path.read_bytes())
        _check(contents[-1], path, f"WikiText-2's {part} part", md5)
    return np.frombuffer(b"".join(contents), np.uint8)


def _check(content: bytes, path: Path, what: str, md5: str) -> None:
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise DataError(f"data: {path} is not {what} (its MD5 sum must be {md5}); get it again.")


def _local(*names: str) -> Path | None:
    """Return the first copy in ACCORDION_DATA, or None."""
    found = (folder / name for folder in files.folders() for name in names)
    return next((path for path in found if path.is_file()), None)
