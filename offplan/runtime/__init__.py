"""The runtime executes a plan; it imports neither costs nor planner."""
