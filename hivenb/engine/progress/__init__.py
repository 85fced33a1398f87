"""How far the peers of a run are, and who of them is there."""
