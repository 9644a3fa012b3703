"""Private generators trained by teachers' votes (DataLens), beside DP-SGD with the same budget."""
