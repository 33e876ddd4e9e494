"""Measurements of the server from outside, over HTTP."""
