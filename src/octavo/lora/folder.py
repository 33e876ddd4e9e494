"""An adapter's folder: which file has its weights, and the hash that identifies it. Without torch."""

import hashlib
from pathlib import Path

from octavo.errors import AdapterError
from octavo.lora.adapter_config import CONFIG_FILE

SAFETENSORS_FILE = "adapter_model.safetensors"
WEIGHTS_FILES = (SAFETENSORS_FILE, "adapter_model.bin")


def weights_file(folder: Path) -> Path:
    """Return the file with the adapter's tensors.

    Raises:
        AdapterError: there is none.
    """
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    raise AdapterError(f"{folder}: none of {', '.join(WEIGHTS_FILES)}; is it the folder of an adapter?")


def content_hash(folder: Path) -> str:
    """Return the SHA-256 of the adapter's settings and weights: equal for copies under any name.

    Raises:
        AdapterError: one of the files is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, weights_file(folder)):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise AdapterError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
