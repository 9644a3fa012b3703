"""Training on limited links: hosts and a network within one Linux machine.

`scripts/netbench.py` is the entry point. `sandbox` isolates the rig in namespaces of its own,
`network` creates hosts and links, `trace` changes the links' rates over time, `relay` delays and
loses packets, `launch` starts a command on every host, `bench` compares contestants (in the
processes of `worker`), and `page` and `picture` show the results.
"""
