"""What callers and commands ask for in one call: a machine, a question, a session, a benchmark."""
