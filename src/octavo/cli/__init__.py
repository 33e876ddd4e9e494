"""The command line: `octavo generate`, `chat`, `bench`, `env`. Uses the public Python API only."""
