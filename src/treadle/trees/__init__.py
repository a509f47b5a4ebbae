"""Trees: four representations, one interface. The declarations are in `treadle.patterns`."""
