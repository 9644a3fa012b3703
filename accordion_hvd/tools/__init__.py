"""Programs: `python -m accordion_hvd.doctor` and `python -m accordion_hvd.build_horovod`."""
