"""`horovodrun --gloo`, without the import of TensorFlow that only finds out whether Gloo is built.

The import takes three seconds of each launch. tests/tools/test_doctor.py and tests/examples launch
with `horovodrun` itself.
"""

import sys

from horovod.runner import launch

if __name__ == "__main__":  # its children are spawned, and import this module
    launch.gloo_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
