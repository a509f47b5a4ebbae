"""The verbs of the command line: one plain function each, without typer.

A verb takes values, prints through the console that it is given, and returns
data. What can go wrong is raised; `treadle.cli` turns it into one sentence
and an exit code.
"""
