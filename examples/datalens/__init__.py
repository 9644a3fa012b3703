"""Private generators trained by votes of teachers (DataLens), compared with DP-SGD."""
