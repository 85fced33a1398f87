"""Texts that others have a part in, such as errors and lines of a log, made harmless for whoever looks at them."""

from __future__ import annotations

import re

#: What steers a terminal or turns the direction of what follows, and is not seen itself. Not the joiners (U+200C and
#: U+200D), of which words and emoji are made.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """The same text with characters that cannot be seen written out, as ``\\x1b``; line feeds and tabs stay."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
