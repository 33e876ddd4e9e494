"""`octavo convert`: writes a model that Octavo can load as a checkpoint of another format.

`source` reads any model, `targets` lists the formats that can be written, `run` connects them. What changes weights on
the way, such as quantization, maps one `source.Checkpoint` to another.
"""
