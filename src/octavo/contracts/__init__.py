"""Messages that cross a process or package boundary. No behavior, no torch; imports only sampling params and errors."""
