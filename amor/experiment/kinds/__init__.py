"""What can be asked of a finished run: one file a kind, with a `judge`."""
