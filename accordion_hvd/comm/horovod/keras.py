"""`horovod.tensorflow.keras`, for the modules that stand in for it."""

import horovod.tensorflow.keras as hvd

__all__ = ["hvd"]
