"""The HTTP server: routes, middleware and streams around one engine, in the words of OpenAI's API."""
