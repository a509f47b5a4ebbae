"""One file or folder per pattern."""
