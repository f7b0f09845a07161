"""A checkpoint's weights are brought to where a plan puts them, and verified there."""
