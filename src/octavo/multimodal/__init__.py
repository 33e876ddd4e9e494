"""Images in prompts: decoded, cut into patches, and placed among the tokens. No torch.

What is wrong with a request is an `InvalidParameterError`, which names where in the request; with a checkpoint's
settings, a `CheckpointError`, or an `UnsupportedModelError` if they do not fit the tower or are not supported.
"""
