"""Which compressor serves which bucket, and when that changes."""

from accordion_hvd.policy.accordion import Accordion
from accordion_hvd.policy.adaqs import AdaQS
from accordion_hvd.policy.base import Policy
from accordion_hvd.policy.fixed import Fixed
from accordion_hvd.policy.gate import Gate
from accordion_hvd.policy.replay import Replay
from accordion_hvd.policy.schedule import StepSchedule
from accordion_hvd.policy.warmup import WarmUp

__all__ = [
    "Accordion",
    "AdaQS",
    "Fixed",
    "Gate",
    "Policy",
    "Replay",
    "StepSchedule",
    "WarmUp",
]
