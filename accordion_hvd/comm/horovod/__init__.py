"""The only modules, besides the elastic adapters and the tools, that import Horovod."""
