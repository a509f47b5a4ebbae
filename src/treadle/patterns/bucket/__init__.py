"""Bucket and Time Series: many readings per document."""
