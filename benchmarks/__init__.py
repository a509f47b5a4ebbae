"""Treadle beside hand-written PyMongo and the ODMs: `python -m benchmarks`."""
