"""The private local server."""
