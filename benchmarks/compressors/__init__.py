"""The compressors in usual settings: bytes sent, time and memory needed, accuracy kept.

`catalog` lists them, `bytes_sent` writes docs/compressors.md, `kernels` docs/kernels.md and
`training` docs/compressor-accuracy.md.
"""
