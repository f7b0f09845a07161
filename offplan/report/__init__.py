"""What offplan says: tables for people, the same facts as JSON for scripts."""
