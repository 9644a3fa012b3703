"""Communication: requests are packed into collectives of an engine such as Horovod."""
