"""Which requests compute how many tokens in a step, and block ownership. No torch."""
