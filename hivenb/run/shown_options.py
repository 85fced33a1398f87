"""What a person sees of a run's options: those in force, those on their way, and what went wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hivenb.options.options import Options
    from hivenb.run.run_options import RunOptions


class ShowsOptions:
    """Base of a run: properties on its options, which any thread may read."""

    _options: RunOptions

    @property
    def options(self) -> Options:
        """The options in force."""
        return self._options.in_force

    @property
    def pending_options(self) -> Options | None:
        """Options that were asked for and are not in force yet."""
        return self._options.pending

    @property
    def pending_epoch(self) -> int | None:
        """The epoch of the swarm at which the pending options on which all peers agree come into force, if any do."""
        return self._options.pending_epoch

    @property
    def why_not_host(self) -> str | None:
        """Why what all peers have to agree on cannot be changed here at the moment; ``None`` if it can."""
        return self._options.why_not_host

    @property
    def options_error(self) -> Exception | None:
        """Why the options that were asked for last could not be put in force, if they could not."""
        return self._options.error
