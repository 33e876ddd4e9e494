"""The command line: `octavo serve`, `generate`, `chat`, `bench`, `env`. Built on the public Python API."""
