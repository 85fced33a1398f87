"""What the peers of a run agree on, by records in the DHT."""
