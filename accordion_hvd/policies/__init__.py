"""Policies: which compressor serves each bucket, and when it changes."""

from accordion_hvd.policies.accordion import Accordion
from accordion_hvd.policies.adaqs import AdaQS
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.displacement import Displacement
from accordion_hvd.policies.fixed import Fixed, Replay, ScaleComRecipe, StepSchedule, WarmUp
from accordion_hvd.policies.gate import Gate
from accordion_hvd.policies.goodput import Goodput

__all__ = [
    "Accordion",
    "AdaQS",
    "Displacement",
    "Fixed",
    "Gate",
    "Goodput",
    "Policy",
    "Replay",
    "ScaleComRecipe",
    "StepSchedule",
    "WarmUp",
]
