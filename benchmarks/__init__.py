"""Speed, measured: one command per table, with hardware, commit, peers and fraction of the roofline."""
