"""Metrics for operators: Prometheus text and a periodic log line."""
