"""Buckets: many readings in one document, behind the calls of one reading each."""
