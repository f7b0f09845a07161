"""Host memory: blocks that a GPU can read, and how much a process may take."""
