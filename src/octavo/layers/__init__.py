"""Parts that models are composed of. A layer owns its parameters: their shapes, how they are loaded and packed."""
