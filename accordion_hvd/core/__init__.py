"""Interfaces against which algorithms are written."""
