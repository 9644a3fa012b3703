"""The names that `accordion_hvd.__getattr__` returns, for type checkers and editors."""

from accordion_hvd.averaging import *  # noqa: F403
from accordion_hvd.compressors import *  # noqa: F403
from accordion_hvd.core.base import Allgather as Allgather
from accordion_hvd.core.base import Allreduce as Allreduce
from accordion_hvd.core.base import Alltoall as Alltoall
from accordion_hvd.core.base import Broadcast as Broadcast
from accordion_hvd.core.base import Compressor as Compressor
from accordion_hvd.core.base import ExchangeGenerator as ExchangeGenerator
from accordion_hvd.core.base import Info as Info
from accordion_hvd.core.base import Neighbours as Neighbours
from accordion_hvd.core.base import State as State
from accordion_hvd.core.base import Tensor as Tensor
from accordion_hvd.core.codec import Codec as Codec
from accordion_hvd.engine.ledger import CSV as CSV
from accordion_hvd.engine.ledger import JsonLines as JsonLines
from accordion_hvd.engine.ledger import Ledger as Ledger
from accordion_hvd.engine.ledger import MLflow as MLflow
from accordion_hvd.engine.ledger import Perfetto as Perfetto
from accordion_hvd.engine.ledger import Sink as Sink
from accordion_hvd.engine.ledger import TensorBoard as TensorBoard
from accordion_hvd.engine.ledger import WandB as WandB
from accordion_hvd.ops import namespace as namespace
from accordion_hvd.ops.spec import Spec as Spec
from accordion_hvd.policies import *  # noqa: F403
from accordion_hvd.privacy import BudgetSpent as BudgetSpent
from accordion_hvd.privacy import PrivacyBudget as PrivacyBudget
from accordion_hvd.privacy import TopAgg as TopAgg
from accordion_hvd.resolve import as_policy as as_policy
from accordion_hvd.resolve import parse as parse
from accordion_hvd.simulation import simulate as simulate

__version__: str
