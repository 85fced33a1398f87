"""What the others did in a round: told by the averager's process, in which it is seen, to the one that trains."""

from __future__ import annotations

import pickle
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

#: Peers that one account names of each sort, of those that were refused fewer.
MOST_NAMED, MOST_REFUSED = 256, 16

#: Bytes of an account, at most.
_LARGEST = 1 << 17

#: Characters of a reason; some of it is what a peer has sent.
LONGEST_REASON = 120

#: Seconds of waiting that are worth a word.
NOTABLE = 0.5


@dataclass(frozen=True)
class Account:
    """Of one round, or of the search for its group. Peers are told by their ids.

    :param epoch: that it was a round of
    :param took_part: peers whose data and averages have arrived
    :param missed: peers for which this one has waited, and which have not come
    :param stalled: peers in whose group it was, and which have let it wait
    :param overstated: peers that have reported samples of which they have not put half into this round
    :param refused: peers that have sent what was not taken, and why
    :param seconds: that this peer's training has lost by waiting
    """

    epoch: int
    took_part: frozenset[bytes] = frozenset()
    missed: frozenset[bytes] = frozenset()
    stalled: frozenset[bytes] = frozenset()
    overstated: frozenset[bytes] = frozenset()
    refused: tuple[tuple[bytes, str], ...] = ()
    seconds: float = 0.0


_SETS = ("took_part", "missed", "stalled", "overstated")


class AccountBook:
    """Accounts on their way from a process that is forked to the one that has made this. Neither ever waits."""

    def __init__(self) -> None:
        # a pipe takes what is longer than a page in pieces, and may have room for half an account
        self._out, self._in = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._out, self._in):
            end.setblocking(False)
            weakref.finalize(self, end.close)

    def tell(self, account: Account) -> None:
        """Write one; lost if nobody has read for long."""
        named = {name: _some(getattr(account, name)) for name in _SETS}
        refused = tuple((peer, reason[:LONGEST_REASON]) for peer, reason in account.refused[:MOST_REFUSED])
        with suppress(OSError):
            self._in.send(pickle.dumps(Account(account.epoch, **named, refused=refused, seconds=account.seconds)))

    def take(self) -> list[Account]:
        """All that were written since the last call."""
        taken: list[Account] = []
        with suppress(OSError):
            while told := self._out.recv(_LARGEST):
                taken.append(pickle.loads(told))
        return taken


def _some(peers: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(sorted(peers)[:MOST_NAMED])
