"""What somebody may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """A question that names what is spelt alike, to go into the message of an error.

    :param unknown: what was written
    :param known: what there is
    :returns: such as ``"Did you mean target_batch_size? "``; empty if nothing is spelt alike
    """
    known = list(known)
    close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1, cutoff=0.7)]
    return f"Did you mean {', '.join(close)}? " if close else ""
