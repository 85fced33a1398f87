"""Colours, and the one place where they get their meaning.

The hues are those of Okabe and Ito, which colour-blind people can tell apart. The same thing has the same
colour in every panel, and colour never says anything that a word does not say as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE, GREY = "#E69F00", "#D55E00", "#CC79A7", "#8A8F98"

OWN = BLUE  # this peer, and what it sends
SWARM = GREEN  # all peers together, and what comes from them
VALIDATION = VERMILLION
COMPUTING, AVERAGING, WAITING = SKY, ORANGE, GREY
GPU = PURPLE

PAPER, INK, FAINT_INK, GRID, FRAME = "#FFFFFF", "#24292F", "#6B7280", "#ECEEF1", "#C9CED6"

EVENTS = {"run": GREY, "option": PURPLE, "peer": GREEN, "round": ORANGE, "batch": VERMILLION, "rollback": BLUE}

STATES = {
    "ready": GREY,
    "starting": SKY,
    "training": GREEN,
    "paused": ORANGE,
    "stopping": SKY,
    "stopped": GREY,
    "finished": BLUE,
    "failed": VERMILLION,
}


@dataclass(frozen=True)
class Theme:
    """The colours of paper and ink, and what becomes of the others on such paper.

    :param hues: other shades of them, for what is drawn
    :param words: other shades of them, for small words, which need more contrast than lines and areas do
    """

    paper: str
    ink: str
    faint_ink: str
    grid: str
    frame: str
    hues: Mapping[str, str]
    words: Mapping[str, str]

    def hue(self, color: str) -> str:
        """The colour of the same meaning."""
        return self.hues.get(color, color)

    def word(self, color: str) -> str:
        """The colour of a word about what is drawn in :meth:`hue`."""
        return self.words.get(color, self.hue(color))


#: Small words on it have the contrast of 4.5 that https://www.w3.org/TR/WCAG22/#contrast-minimum asks for.
LIGHT = Theme(
    PAPER, INK, FAINT_INK, GRID, FRAME, {},
    {SKY: "#1A7BB8", GREEN: "#00805D", ORANGE: "#956700", VERMILLION: "#BF5400", PURPLE: "#B0568A", GREY: FAINT_INK},
)  # fmt: skip
#: The same hues; those that are dark themselves are lighter here.
DARK = Theme(
    "#161A1F", "#E6E9ED", "#9AA3AF", "#272D35", "#4A525D",
    {BLUE: "#3FA2E0", GREEN: "#1FBF92", VERMILLION: "#F27A26", GREY: "#A3A9B3"},
    {},
)  # fmt: skip
