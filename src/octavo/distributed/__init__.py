"""Ranks that talk to each other: groups, and what they exchange."""
