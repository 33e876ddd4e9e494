"""From the form that an answer must have to the tokens that may come next. Beside the scheduler; no tensors."""
