"""Loads weights into a model: `registry` selects the loader by format.

What is missing, damaged or of another model is a `CheckpointError`, which names the file or tensor; what Octavo does
not read, an `UnsupportedModelError`.
"""
