"""Differentially private training: budgets, aggregation, sampling, per-example gradients.

`PrivacyBudget` adds up the privacy cost of releases, and `TopAgg` is the private aggregation.
`ballot.Ballot` aggregates votes of teachers on any vectors, and `PoissonSampler` draws lots of
examples. `privacy.torch` and `privacy.tensorflow` compute the gradients of single examples.
"""

from accordion_hvd.privacy.budget import (
    BudgetSpent,
    PoissonSampler,
    PrivacyBudget,
    Release,
    multiplier_for,
)
from accordion_hvd.privacy.topagg import TopAgg

__all__ = ["BudgetSpent", "PoissonSampler", "PrivacyBudget", "Release", "TopAgg", "multiplier_for"]
