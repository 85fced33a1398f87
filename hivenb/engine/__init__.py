"""The only place that reaches into hivemind's internals, always by subclassing."""

from hivenb._library_warnings import library_warnings_ignored
from hivenb.engine.process.shared_memory import require_locks

require_locks()
with library_warnings_ignored():  # of torch.jit.script, by which these two compile a function each
    import hivemind
    import hivemind.utils.math  # noqa: F401
