"""The ledger of an exchange, the receipt that is made from it, and sinks for other programs."""

from accordion_hvd.engine.ledger.ledger import Ledger, LedgerOption, as_ledger
from accordion_hvd.engine.ledger.sinks import (
    CSV,
    JsonLines,
    MLflow,
    Perfetto,
    Record,
    Sink,
    TensorBoard,
    Tracker,
    WandB,
)

__all__ = [
    "CSV",
    "JsonLines",
    "Ledger",
    "LedgerOption",
    "MLflow",
    "Perfetto",
    "Record",
    "Sink",
    "TensorBoard",
    "Tracker",
    "WandB",
    "as_ledger",
]
