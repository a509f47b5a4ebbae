"""MongoDB's language, checked; paths, keys and windows."""
