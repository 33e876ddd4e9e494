"""Speed of single ops."""
