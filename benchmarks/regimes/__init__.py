"""Accordion and its competitors: trainings for docs/results.md (`make results`)."""
