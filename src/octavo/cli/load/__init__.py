"""Load on a server from outside: planned requests, a loop that sends them, records, figures, a picture."""
