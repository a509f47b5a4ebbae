"""Load on a replica set while its members fail, and an account of what became of every write.

    python -m benchmarks.torture                                   a set of three on this machine
    python -m benchmarks.torture mongodb://staging/empty_database  a set of yours

`models.py` has a model for each pattern, `writers.py` decides what is written,
`load.py` runs writers, workers and jobs, blocking or on asyncio, `journal.py`
keeps what each write may have left behind, and `oracle.py` compares that with
what is stored, in plain PyMongo. `rounds.py` causes the faults.
"""
