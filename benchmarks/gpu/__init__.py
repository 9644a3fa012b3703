"""Checks of one GPU: laws, step times, ranks that share it, and waits of the host."""
