"""Faults that the tests must catch, planted one at a time in a copy of the tree."""
