"""The HTTP server: the OpenAI API, and what it takes to operate it."""
