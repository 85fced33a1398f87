"""Programs: the command, the demonstration, the lab, and the inside of a local peer."""
