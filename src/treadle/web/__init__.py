"""The dashboard: what `treadle serve` shows, and what it lets an operator do."""
