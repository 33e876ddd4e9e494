"""Loads weights into a model: `registry` selects the loader by format."""
