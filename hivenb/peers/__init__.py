"""Peers as processes of this machine, as seen from the process that adds them."""
