"""From requests to an engine's collectives."""
