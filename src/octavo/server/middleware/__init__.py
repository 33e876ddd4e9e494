"""What stands between the connection and the routes: pure ASGI, one concern per file. `server/app.py` orders them."""
