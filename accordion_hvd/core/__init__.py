"""What algorithms are written against."""
