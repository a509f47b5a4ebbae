"""History: each state that a document had, with the time from which it held and at which it ended."""
