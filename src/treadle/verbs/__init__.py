"""The wiring of the command line: options, streams and exit codes of each verb, by family."""
