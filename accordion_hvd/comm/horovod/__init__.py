"""Communicators over Horovod; besides these, only elastic adapters and tools import Horovod."""
