"""Ollama's API, as forms of OpenAI's requests and answers."""
