"""What follows from a trial: one `models.py`, a plan, and how it is applied, proven and undone."""
