"""Text to tokens and back: the tokenizer, its chat template, and the incremental detokenizer. No torch.

Raises `CheckpointError` with the file that is missing or malformed, and `InvalidParameterError` for what a client sent.
"""
