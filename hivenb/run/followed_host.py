"""What a person can do about the host of a run: believe it no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hivenb.errors import OptionsError

if TYPE_CHECKING:
    from hivenb.run.run_options import RunOptions


class FollowsHost:
    """Mixin for a run whose options change when its host says so."""

    _options: RunOptions

    def depose_host(self) -> str:
        """Follow the present host no more, and train with this peer's own options until the next host decides.

        What it has decided is not passed on to those who come later. The other peers go on to follow it, unless they
        depose it as well.

        :returns: id of the peer that was the host
        :raises OptionsError: if this peer is the host, or there is none
        """
        hosting = self._options.hosting
        if hosting is None:
            raise OptionsError("the run does not train, and follows nobody")
        return hosting.depose()
