"""The log of requests, and computing one again."""
