"""Devices: what this machine has, what it can do, and who computes on it."""
