"""One write, and all that follows from it."""
