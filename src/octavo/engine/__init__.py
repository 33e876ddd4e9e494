"""Text in, text out around the core, and the core itself."""
