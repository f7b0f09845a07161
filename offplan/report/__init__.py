"""Reports of offplan: tables for people, the same facts as JSON for scripts."""
