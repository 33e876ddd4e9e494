"""The HTTP server: routes, middleware and streams around one engine, speaking OpenAI's API."""
