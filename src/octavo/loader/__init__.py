"""Loads weights into a model: `base` selects the loader by format."""
