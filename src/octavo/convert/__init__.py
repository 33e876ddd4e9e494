"""`octavo convert`: writes a model that Octavo can load as a checkpoint of another format.

`source` reads any model, `run` lists the formats that can be written and connects the two. Changes of weights, such as
quantization, turn one `source.Checkpoint` into another. What a format cannot express is an `UnsupportedModelError`.
"""
