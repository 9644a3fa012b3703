"""Train a GCN whose nodes are spread over ranks: `horovodrun -np 4 python scripts/train_gcn.py`.

Trains with one sampler after another (`--skews`, `--budgets`), with several seeds each (`--seeds`),
and ends with a table and a picture: test accuracy, rows and bytes that came from other ranks, time
of an epoch.
"""

from __future__ import annotations

from accordion_hvd.experiment import graph_config, graph_report

if __name__ == "__main__":
    graph_report.start(graph_config.read(__doc__))
