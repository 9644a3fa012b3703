"""A test function on each rank: `one_function.py FILE NAME`; see `launch.ranks`."""

import importlib.util
import sys
from pathlib import Path

import harness


def main() -> None:
    file, name = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = [str(file.parent), str(Path(__file__).parents[1] / "support")]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    harness.run({name: getattr(module, name).on_a_rank})


if __name__ == "__main__":
    main()
