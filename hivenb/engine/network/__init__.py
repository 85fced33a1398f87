"""The DHT: its process, its node, its daemon, and records in it."""
