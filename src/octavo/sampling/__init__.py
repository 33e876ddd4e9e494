"""From logits to the next token: logits processors, filters, and noise by (seed, output index, token id)."""
