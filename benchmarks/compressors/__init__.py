"""Benchmarks of compressors in usual settings: bytes sent, time, memory and accuracy.

`catalog` lists the settings, `bytes_sent` writes docs/compressors.md, `kernels` writes
docs/kernels.md and `training` writes docs/compressor-accuracy.md.
"""
