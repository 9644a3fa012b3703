"""Methods that average models instead of gradients, one file per method."""

from accordion_hvd.averaging.cold import COLD, DynaCOLD
from accordion_hvd.averaging.diloco import DiLoCo, Nesterov
from accordion_hvd.averaging.dpsgd import DPSGD
from accordion_hvd.averaging.local_sgd import LocalSGD
from accordion_hvd.averaging.topology import Topology
from accordion_hvd.averaging.wagma import WAGMA

__all__ = ["COLD", "DPSGD", "DiLoCo", "DynaCOLD", "LocalSGD", "Nesterov", "Topology", "WAGMA"]
