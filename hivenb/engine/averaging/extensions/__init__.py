"""What joins an averager beside the tensors of hivemind's: buffers, an outer optimizer, an early beginning."""
