"""Communicator and Horovod's interface over torch.distributed, with any of its backends."""

import torch

if not hasattr(torch.distributed.Store, "clone"):
    raise ImportError(
        f"torch is {torch.__version__}, but must be 2.8 or newer: pip install 'torch>=2.8'."
    )
