"""Computed: values over a source collection, and formulas over the document's own fields."""
