"""Other engines' flags for a plan, or a refusal that says what they would lose."""
