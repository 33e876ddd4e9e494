"""Images in prompts: decoded, cut into patches, and placed among the tokens. No torch."""
