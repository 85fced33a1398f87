"""The machine and the place that this runs on."""
