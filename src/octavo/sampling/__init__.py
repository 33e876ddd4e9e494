"""From logits to the next token: edits, filters, and noise that is a function of (seed, output index, token id)."""
