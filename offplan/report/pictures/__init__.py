"""Pictures of plans, as SVG: the same drawings stand in a page and in a file of their own."""
