"""Command-line tools: `accordion_hvd.tools.doctor` and `accordion_hvd.tools.build_horovod`."""
