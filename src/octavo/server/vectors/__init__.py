"""Vectors and scores over HTTP: routes of several engines and clouds, on the same requests as `/v1/embeddings`."""
