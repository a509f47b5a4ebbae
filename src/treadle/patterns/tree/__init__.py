"""Trees: four representations, one interface."""
