"""Finding a model and filling it with weights: `hub` needs no torch, `base` chooses among the loaders."""
