"""Tables, figures and pages: they read files and plain data, never models."""
