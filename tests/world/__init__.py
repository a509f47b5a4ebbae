"""Generated worlds: items and owners with any features, one history of writes, one oracle.

A world is a set of class features on the item (the source of aggregates, the
target of references) and on the owner (the other way round), and one mode of
maintenance. All derived values are declared in each world. Only the public
names of Treadle and PyMongo are used.
"""
