"""Measured and predicted times per step, on limited links of this machine: `scripts/bench_plan.py`.

The model behind `accordion-hvd plan` was fitted to some of the cells and is judged by the others,
which `held_out.txt` names.
"""
