"""What a study can measure of a finished run: one file per kind, found by the registry."""
