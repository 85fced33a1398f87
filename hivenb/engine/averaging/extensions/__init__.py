"""What a round of the state has beside parameters: buffers, an outer optimizer, an early beginning."""
