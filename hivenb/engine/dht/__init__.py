"""The DHT: its process, its node, and records in it."""
