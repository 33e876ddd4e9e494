"""Which requests compute how many tokens in a step, and who owns which KV block. No torch."""
