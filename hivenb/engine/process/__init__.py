"""Processes of this machine: how children are forked, and that none outlives its parent."""
