"""Ids of peers, as people read them."""

from __future__ import annotations


def short_id(peer_id: str) -> str:
    """The end of a peer's id: the beginning is the same for all."""
    return "…" + peer_id[-6:]
