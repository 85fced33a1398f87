"""History and what it is made of. They live in :mod:`hivenb.figures.history`; this import path stays."""

from hivenb.figures.history import EVENT_KINDS, MAX_EVENTS, MAX_SERIES, Event, History, OptionChange, Series, Snapshot

__all__ = ["EVENT_KINDS", "MAX_EVENTS", "MAX_SERIES", "Event", "History", "OptionChange", "Series", "Snapshot"]
