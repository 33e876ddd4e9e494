"""Settings: small frozen dataclasses, resolved once from `EngineArgs` and never changed. No torch."""
