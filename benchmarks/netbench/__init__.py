"""Training on limited links: hosts and a network within one Linux machine, measured side by side.

`scripts/netbench.py` is the entry point. `sandbox` keeps all of it in namespaces of its own,
`network` makes hosts and links, `launch` starts a command on every host, `bench` measures
contestants side by side (in workers, `worker`), and `report` shows what was found.
"""
