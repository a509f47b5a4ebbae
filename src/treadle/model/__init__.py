"""Document, and how a Pydantic model becomes a stored document."""
