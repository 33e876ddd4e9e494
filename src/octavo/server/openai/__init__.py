"""OpenAI's API: wire types, the service that turns them into engine requests and back, and its streams."""
