"""What a peer sends to its group before a round: hivemind's own fields, and the mark of ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hivemind.averaging.allreduce import AveragingMode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from hivenb.engine.network.untrusted_values import BoundedSerializer

#: What hivemind's averager sends to its group with each round: bandwidth, mode, the caller's own.
UPSTREAM_FIELDS = 3

#: What ours add to it; a peer of plain hivemind reads the fields that it knows and no further.
MARK = "hivenb"

#: What a peer adds that may begin its round before the trigger: when it is ready, or as soon as its group has met.
EARLY, AT_ONCE = "early", "at once"

#: What a peer adds whose line to others is long.
FAR = "far"

#: Bytes of what a peer sends to its group; each of them gets all.
LONGEST_GATHER = 1 << 16

#: Peers of a group at most. hivemind shares a model out among them by matrices that grow by the square of their number:
#: of so many, an averager's process takes 0.35 GB meanwhile; of a thousand, 0.55 GB.
LARGEST_GROUP = 512

#: Bytes of the id that a leader draws for its group.
GROUP_ID_BYTES = DHTID.HASH_NBYTES

#: Bandwidths between which hivemind can share a model out among a group, whatever they are measured in.
SLOWEST, FASTEST = 1e-9, 1e15


def marked(gather: bytes, fields: Iterable[Any] = (), megabits: float | None = None) -> bytes:
    """What a peer of ours sends to its group: what hivemind would, with the mark of ours.

    :param gather: as hivemind has made it
    :param fields: more that the peer says of itself
    :param megabits: a second that its line can send, unless the user has said that; ``None`` if it is not known
    """
    record = BoundedSerializer.loads(gather)
    return BoundedSerializer.dumps([megabits if record[0] is None else record[0], *record[1:], *fields, MARK])


def of_upstream(record: list[Any]) -> bytes:
    """Of what a peer has sent to its group, what hivemind knows."""
    return BoundedSerializer.dumps(record[:UPSTREAM_FIELDS])


def says(record: list[Any], word: str) -> bool:
    """Whether a peer says a word of itself, beside what peers of plain hivemind do."""
    return word in record[UPSTREAM_FIELDS:]


def is_marked(record: list[Any]) -> bool:
    """Whether a peer of ours has sent that record."""
    return says(record, MARK)


def is_helper(record: list[Any]) -> bool:
    """Whether a peer only helps the others to average."""
    return bool(record[1] == AveragingMode.AUX.value)


def averages_its_own(gather: bytes) -> bool:
    """Whether a peer sends its own numbers and averages those of others, by what it has sent to its group.

    A client averages nothing, and cannot be dialled; a helper has no numbers of its own.

    :param gather: is readable
    """
    return bool(BoundedSerializer.loads(gather)[1] == AveragingMode.NODE.value)


def is_far(record: list[Any]) -> bool:
    """Whether the line of a peer is long, as it says."""
    return says(record, FAR)


def all_offer_early(gathered: Sequence[bytes]) -> bool:
    """Whether a group is of ours alone that may all begin equally early; they are readable."""
    records = [BoundedSerializer.loads(gather) for gather in gathered]
    are_of_ours = all(map(is_marked, records))
    return are_of_ours and any(all(says(record, word) for record in records) for word in (EARLY, AT_ONCE))


def epoch_of(gather: bytes) -> int | None:
    """The epoch whose round a peer of ours looks for; ``None`` if it does not say, or is not one of ours."""
    try:
        record = BoundedSerializer.loads(gather)
        return epoch_in(record) if is_marked(record) else None
    except (ValueError, TypeError):  # anybody may send anything
        return None


def epoch_in(record: list[Any]) -> int | None:
    """The epoch whose round a peer looks for; ``None`` if it does not say."""
    try:
        epoch = BoundedSerializer.loads(record[UPSTREAM_FIELDS - 1])
    except (ValueError, TypeError, IndexError):  # anybody may send anything
        return None
    return epoch if isinstance(epoch, int) else None


def is_readable(gather: bytes) -> bool:
    """Whether a group can begin with what a peer has sent to it; no round of the group would succeed otherwise."""
    if len(gather) > LONGEST_GATHER:
        return False
    try:
        bandwidth, mode, own = BoundedSerializer.loads(gather)[:UPSTREAM_FIELDS]
        AveragingMode(mode)
        BoundedSerializer.loads(own)
        is_number = isinstance(bandwidth, (int, float))
        return bandwidth is None or (is_number and (bandwidth == 0 or SLOWEST <= bandwidth <= FASTEST))
    except Exception:  # anybody may send anything, and msgpack raises what it likes
        return False


def why_no_group(message: averaging_pb2.MessageFromLeader, own: PeerID) -> str | None:
    """Why what a leader says to those that follow it is no group to begin with, in words; ``None`` if it is one.

    :param own: the id of this peer
    """
    ids = message.ordered_peer_ids
    if own.to_bytes() not in ids:
        return "this peer is not in it"
    if len(set(ids)) != len(ids):
        return "somebody is in it twice"
    if len(ids) > LARGEST_GROUP:
        return f"it is of {len(ids)} peers, more than {LARGEST_GROUP}"
    if len(message.gathered) != len(ids):
        return f"{len(message.gathered)} of its {len(ids)} peers have said something of themselves"
    if not all(map(is_readable, message.gathered)):
        return "nobody can have said that of itself"
    # all others begin with the empty id, by which peers tell each other that they have left one
    if len(message.group_id) != GROUP_ID_BYTES:
        return f"its id is of {len(message.group_id)} bytes instead of {GROUP_ID_BYTES}"
    return None
