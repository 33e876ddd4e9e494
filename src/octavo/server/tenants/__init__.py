"""Keys with names: what each may use, how much, and a fair share of the engine for all."""
