"""The averagers of gradients and of the training state."""
