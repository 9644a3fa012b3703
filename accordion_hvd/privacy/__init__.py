"""Private training: what releases cost, sampling, teachers, gradients of single examples.

`PrivacyBudget` counts; `TopAgg` adds the noise. `ballot.Ballot` lets teachers vote on
whatever one likes, `PoissonSampler` draws lots of examples; `privacy.torch` and
`privacy.tensorflow` give the gradients of single examples.
"""

from accordion_hvd.privacy.budget import BudgetSpent, PrivacyBudget, Release, multiplier_for
from accordion_hvd.privacy.sampling import PoissonSampler
from accordion_hvd.privacy.topagg import TopAgg

__all__ = ["BudgetSpent", "PoissonSampler", "PrivacyBudget", "Release", "TopAgg", "multiplier_for"]
