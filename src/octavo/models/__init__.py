"""Model architectures, each defined by its differences from the family. `registry` finds them by name."""
