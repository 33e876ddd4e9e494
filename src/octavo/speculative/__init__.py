"""Drafters: they guess tokens that a step of the model then verifies. What runs on the host does not import torch."""
