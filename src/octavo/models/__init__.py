"""Model architectures, each a difference from its family. `registry` finds them by name."""
