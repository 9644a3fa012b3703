"""The fault matrix: trainings in which one rank meets a fault; writes docs/reliability.md."""
