"""Colours, and the one place where they get their meaning.

The hues are those of Okabe and Ito, which colour-blind people can tell apart. The same thing has the same
colour in every panel, and colour never says anything that a word does not say as well.
"""

from __future__ import annotations

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE, GREY = "#E69F00", "#D55E00", "#CC79A7", "#8A8F98"

OWN = BLUE  # this peer
SWARM = GREEN  # all peers together
VALIDATION = VERMILLION

PAPER, INK, FAINT_INK, GRID, FRAME = "#FFFFFF", "#24292F", "#6B7280", "#ECEEF1", "#C9CED6"

EVENTS = {"run": GREY, "option": PURPLE, "peer": GREEN, "round": ORANGE}

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
