"""Text in, text out around the core; and the core itself, here or in a process of its own."""
