"""OpenAI's API: wire types, the service that converts them to engine requests and back, and streams."""
