"""Parse a model's text into content, reasoning and tool calls as it streams. Pure: no engine, no wire format."""
