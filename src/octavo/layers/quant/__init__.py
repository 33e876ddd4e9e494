"""Weight schemes: in which form the weights of a linear layer come and are kept. `registry` finds those of a model."""
