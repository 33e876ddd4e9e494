"""What this machine can do at most: the roofline that every figure is a fraction of."""
