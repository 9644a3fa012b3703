"""The module `horovod.tensorflow.keras`, for the modules that replace it."""

import horovod.tensorflow.keras as hvd

__all__ = ["hvd"]
