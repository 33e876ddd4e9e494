"""One rank: the model, its KV memory and the rows of the requests that run on it."""
