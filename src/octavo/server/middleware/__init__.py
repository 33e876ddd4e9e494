"""Middleware between the connection and the routes: pure ASGI, one concern per file, assembled in `server/app.py`."""
