"""Text in, text out, around the engine core; and the core itself, in this or a separate process."""
