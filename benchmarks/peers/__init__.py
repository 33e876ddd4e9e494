"""Octavo beside other engines: same geometry, same weights, same prompts, same definition of every figure."""
