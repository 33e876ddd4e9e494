"""`octavo convert`: writes a model that Octavo can load as a checkpoint of another format.

`source` reads any model, `targets` lists the formats that can be written, `run` connects them. Changes of weights, such
as quantization, turn one `source.Checkpoint` into another.
"""
