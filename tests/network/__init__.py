"""A simulated internet of real network namespaces, and peers that train across it."""
