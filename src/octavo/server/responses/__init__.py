"""OpenAI's Responses API: requests become chats, and replies are written from the deltas of a chat."""
