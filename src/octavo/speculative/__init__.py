"""Speculation on the host: no torch here. What guesses with a model runs in the ranks."""
