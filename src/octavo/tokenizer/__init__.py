"""Text to tokens and back: the tokenizer, its chat template, and the incremental detokenizer. No torch."""
