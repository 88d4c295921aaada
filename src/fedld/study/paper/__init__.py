"""What reproduces the paper: its tables and its figure."""
