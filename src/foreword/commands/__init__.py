"""One command a module: its function `run`."""
