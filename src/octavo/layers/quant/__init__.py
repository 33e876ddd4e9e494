"""Weight schemes: how a linear layer's weights are stored and computed. `base` finds those of a model.

What Octavo does not support of a checkpoint is an `UnsupportedModelError`; malformed settings, a `CheckpointError`.
"""
