"""Target in the tensorizer format: one file that loads as a stream, written by the library of that name."""

from pathlib import Path
from typing import Any

from octavo.convert.companions import write_companions
from octavo.convert.source import Checkpoint
from octavo.convert.target_options import TargetOptions
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.loader.tensorized import FILE_NAME


def write_tensorized(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    """Write model.tensors and the other files of a checkpoint.

    Raises:
        InvalidParameterError: the library is not installed, or an option without effect is given.
        UnsupportedModelError: too many tensors for the format's index.
    """
    options.refuse("tensorizer", "max_shard_bytes", "tensor_parallel_size", "gguf_type")
    library = _library()
    write_companions(checkpoint, out)
    serializer = library.TensorSerializer(str(out / FILE_NAME))
    try:
        for number, (name, tensor) in enumerate(checkpoint.tensors()):
            try:
                serializer.write_tensor(number, name, library.TensorType.STATE_DICT, tensor.contiguous())
            except RuntimeError as error:  # its index has a fixed size, for some 3,000 names
                raise UnsupportedModelError(f"{name}: cannot be written in this format: {error}") from error
    finally:
        serializer.close()


def _library() -> Any:
    try:
        import tensorizer.serialization
    except ImportError as error:
        limit = "needs the package tensorizer: python -m pip install 'octavo[tensorizer]'"
        raise InvalidParameterError("to", "tensorizer", limit) from error
    return tensorizer.serialization
