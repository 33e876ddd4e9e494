"""Clients that leave and come back: answers that are kept, and the journal that outlives a kill."""
