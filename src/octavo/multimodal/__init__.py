"""Images in prompts: decoded, cut into patches, and given their place among the tokens. No torch."""
