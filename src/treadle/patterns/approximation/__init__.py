"""Approximation: a number that changes too often to be written each time."""

from treadle.patterns.approximation.declaration import Approximate as Approximate
