"""What a plan costs: compute, memory, and the timeline that prices a schedule."""
