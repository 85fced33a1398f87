"""Who may take part in a private swarm, and what a stranger may do."""
