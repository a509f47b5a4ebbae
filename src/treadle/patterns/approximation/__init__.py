"""Approximation: a number that changes too often to be written each time."""

from treadle.patterns.approximation.rule import Approximate as Approximate
