"""The compressed optimizers for PyTorch, one for each update rule.

`scripts/write_stubs.py` writes their signatures to `compressed.pyi`, for type checkers and editors.
"""

from accordion_hvd import optimizers
from accordion_hvd.torch.optimizers import from_rule

NATIVE = {name: from_rule(name, __name__) for name in optimizers.NATIVE}
NATIVE |= {alias: NATIVE[name] for alias, name in optimizers.ALIASES.items()}
globals().update(NATIVE)

__all__ = sorted(NATIVE)
