"""hivemind's optimizer, which ends epochs, and what it needs for that."""
