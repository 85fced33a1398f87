"""Who meets whom: groups of the peers that are at the same epoch."""
