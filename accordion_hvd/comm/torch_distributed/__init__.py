"""Communicator and Horovod's interface over torch.distributed, with any of its backends."""
