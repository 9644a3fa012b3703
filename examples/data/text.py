"""Tiny Shakespeare: 1.1 million characters of plays, as in char-rnn (Karpathy, 2015)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.data import files
from examples.data.base import Array, DataError

SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
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
    path = _local() or files.fetched(SOURCE, MD5, "Tiny Shakespeare", instead="")
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != MD5:
        raise DataError(
            f"data: {path} is not Tiny Shakespeare (its MD5 sum must be {MD5}); get it again."
        )
    characters, codes = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
    cut = int(PART * len(codes))
    return Text(codes[:cut], codes[cut:], bytes(characters).decode("ascii"))


def _local() -> Path | None:
    """Return the first copy in ACCORDION_DATA, or None."""
    names = ("tinyshakespeare/input.txt", "tinyshakespeare.txt")
    found = (folder / name for folder in files.folders() for name in names)
    return next((path for path in found if path.is_file()), None)
