"""`octavo convert --quantize`: low-bit weights, rounded for the inputs that their layers get on a calibration text.

`inputs` runs the model and records the inputs of its linear layers, `rounding` rounds one weight, and `quantize` turns
one `convert.source.Checkpoint` into another. `layers/quant/octavo.py` loads the result.
"""
