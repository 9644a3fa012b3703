"""Command-line tools: `accordion_hvd.doctor` and `accordion_hvd.build_horovod`."""
