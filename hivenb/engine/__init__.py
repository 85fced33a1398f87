"""The only place that reaches into hivemind's internals, always by subclassing."""
