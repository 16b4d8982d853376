"""One file for each system under test; each registers itself by entry point."""
