"""A package, so that its modules may be called like those of its neighbours."""
