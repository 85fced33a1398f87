"""The charts of a dashboard: what they show, and how it is drawn."""
