"""What `treadle demo` shows: a naive shop, what it asks for, and the same with patterns."""
