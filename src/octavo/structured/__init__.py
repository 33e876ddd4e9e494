"""Structured output: from constraints to the allowed next tokens. Runs alongside the scheduler; no tensors."""
