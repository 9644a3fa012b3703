"""What `scripts/` share: settings from YAML, training in both frameworks, results, the picture."""
