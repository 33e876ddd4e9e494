"""Weight schemes: how a linear layer's weights are stored and computed. `registry` finds those of a model."""
