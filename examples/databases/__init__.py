"""Six databases to try the advisor on, made the same each time.

    python -m examples.databases music_shop mongodb://localhost:27017/music_shop
    treadle scan mongodb://localhost:27017/music_shop --html report.html

Each is a module with a `fill(maker)`. The numbers of documents are between
10,000 and 200,000; `scale` makes them smaller or larger.
"""
