"""Settings: small frozen dataclasses, resolved once from `EngineArgs`, never patched. No torch."""
