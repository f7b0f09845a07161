"""Which experts tokens choose, and how soon they choose them again."""
