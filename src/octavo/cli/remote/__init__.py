"""A client of OpenAI-compatible servers, Octavo's or any other: HTTP, server-sent events, a conversation."""
