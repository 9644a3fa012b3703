"""Averaging of models: accuracy, late ranks, a thousand virtual ranks; writes docs/averaging.md."""
