"""What the hardware does: one profile file a machine, each figure with its source."""
