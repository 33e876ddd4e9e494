"""The page at `/`: a chat, and a live view of the engine. Its files are in `static/`, as they are sent."""
