"""Scikit-learn's digits: 1,797 real 8 x 8 images, part of scikit-learn; nothing is downloaded."""

from __future__ import annotations

import numpy as np

from examples.data.base import DataError, Dataset, Split

TEST = 360
"""Number of images for testing."""


def load_digits() -> Dataset:
    """Load 1,437 images for training and 360 for testing, always the same.

    Raises:
        DataError: if scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise DataError(
            "data: digits are part of scikit-learn, which is not installed; "
            "install it (pip install scikit-learn)."
        ) from None
    bunch = datasets.load_digits()
    images = bunch.images.astype(np.uint8)[..., np.newaxis]
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:TEST], order[TEST:]
    return Dataset(
        "digits",
        Split(images[train], labels[train]),
        Split(images[test], labels[test]),
        classes=10,
        mean=(4.88,),
        std=(6.02,),
    )
