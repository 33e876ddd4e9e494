"""What outlives the server: its folder and the SQLite file within."""
