"""Load generator for servers: planned requests, a loop that sends them, records, statistics, a plot."""
