"""What a session costs is measured: whole plans, what they compare with, single layers."""
