"""What the peers of a group send each other: all-reduce, all-gather, codecs."""
