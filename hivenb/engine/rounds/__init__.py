"""Rounds of averaging: who meets whom, and what they exchange."""
