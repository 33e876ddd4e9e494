"""`octavo convert --quantize`: weights in few bits, rounded for the inputs that they meet on a calibration text.

`request` reads what the command is told, `text` the text. `inputs` runs the model and records what its linear layers
read, `rounding` rounds one weight, `plan` says which layers get how many bits, and `quantize` maps one
`convert.source.Checkpoint` to another. `layers/quant/octavo.py` loads the result.
"""
