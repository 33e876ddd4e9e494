"""Collects the API keys that clients may send."""

from pathlib import Path

from octavo.errors import InvalidParameterError
from octavo.server.args import ServerArgs


def load_api_keys(args: ServerArgs) -> tuple[str, ...]:
    """Return the keys given as options and those in the file: one per line, blank lines and # comments aside.

    Raises:
        InvalidParameterError: the file cannot be read, or holds no key; then the server would stand open.
    """
    if args.api_key_file is None:
        return args.api_key
    try:
        lines = Path(args.api_key_file).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("api_key_file", args.api_key_file, f"cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidParameterError("api_key_file", args.api_key_file, "holds no key")
    return (*args.api_key, *keys)
