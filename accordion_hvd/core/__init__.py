"""The interfaces that algorithms implement and use."""
