"""Numbers for operators: counted while requests run, shown as Prometheus text and as a line in the log."""
