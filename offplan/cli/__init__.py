"""The command line: a file for each command, and ``main`` where errors become exit codes."""
