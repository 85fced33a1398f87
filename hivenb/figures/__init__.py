"""What was measured, and what it suggests."""
