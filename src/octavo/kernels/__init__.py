"""Compute ops: `reference` defines each op, the other files implement it faster, `dispatch` chooses."""
