"""The formats that `octavo convert` writes."""

from types import MappingProxyType

# name -> module and function, imported on demand. A function takes a `Checkpoint`, an empty folder and the options.
TARGETS = MappingProxyType(
    {
        "safetensors": ("octavo.convert.folders", "write_safetensors"),
        "pt": ("octavo.convert.folders", "write_torch"),
        "gguf": ("octavo.convert.gguf_file", "write_gguf"),
        "sharded_state": ("octavo.convert.sharded", "write_sharded"),
        "tensorizer": ("octavo.convert.tensorized", "write_tensorized"),
    }
)
