"""Archive: old documents move to another collection, and stay part of what is counted."""
