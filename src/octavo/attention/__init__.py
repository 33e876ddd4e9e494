"""Attention over paged KV memory: one file per backend, chosen by `selector`."""
