"""Tools that the tests share: logs of commands, faults, and processes to kill."""
