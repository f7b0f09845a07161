"""Calls for callers and commands: a machine, a question, a session, a benchmark."""
