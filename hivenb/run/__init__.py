"""A run: a Trainer in a background thread, its options and what it records."""
