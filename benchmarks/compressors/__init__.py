"""The compressors in usual settings: bytes sent, time and memory needed, accuracy kept.

`shelf` lists them, `volumes` writes docs/compressors.md, `kernels` docs/kernels.md and `training`
docs/shelf.md.
"""
