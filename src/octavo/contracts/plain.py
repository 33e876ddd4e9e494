"""Numbers and texts of subclasses, such as numpy's float64 and members of enums: valid values that no encoder knows."""


def plain(value: object) -> int | float | str:
    """Return the value as the built-in type that it is a kind of. An `enc_hook` of msgspec."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    assert isinstance(value, str), f"{type(value)} cannot be sent"
    return str.__str__(value)  # not `str(value)`: the text of an enum's member is its name
