"""Graph networks with nodes distributed over ranks: neighbour sampling that prefers local nodes.

```python
graph = Graph.from_edges(edges, nodes)
part = partition(graph, hvd.size())
sampler = SkewedSampler(graph, part, hvd.rank(), fanout=(10, 10), budget=2)
mine = np.flatnonzero(part.owner == hvd.rank())
store = FeatureStore(features[mine], part, "torch", graph=graph)
blocks = sampler.sample(targets, epoch, step)
x = store.fetch(blocks[0].sources)
```
"""

from __future__ import annotations

from accordion_hvd.graph.sampler import Block, Sampler, SkewedSampler
from accordion_hvd.graph.skew import SecondMomentGuard, Trace, skew_for, tight_skew, worst_case_skew
from accordion_hvd.graph.store import FeatureStore
from accordion_hvd.graph.structure import Graph, Partition, partition

__all__ = [
    "Block",
    "FeatureStore",
    "Graph",
    "Partition",
    "Sampler",
    "SkewedSampler",
    "Trace",
    "SecondMomentGuard",
    "partition",
    "skew_for",
    "tight_skew",
    "worst_case_skew",
]
