"""Text of a model to content, reasoning and tool calls, as it streams. Pure: no engine, no wire format."""
