"""Outlier: an array that is embedded up to a limit, and continues in a collection of its own."""

from treadle.patterns.outlier.declaration import Outlier as Outlier
