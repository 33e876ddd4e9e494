"""A client for OpenAI-compatible servers: HTTP, server-sent events, chat."""
