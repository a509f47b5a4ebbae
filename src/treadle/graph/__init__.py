"""The interface of patterns, and the models of a Store taken together."""
