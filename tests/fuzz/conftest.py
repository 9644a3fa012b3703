"""Hook that reports how many inputs of each kind were tried."""

from __future__ import annotations

from typing import Any

from fuzzing import tried


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if tried:
        terminalreporter.section("inputs tried")
        for kind, count in sorted(tried.items()):
            terminalreporter.write_line(f"{count:>9,}  {kind}")
        terminalreporter.write_line(f"{sum(tried.values()):>9,}  in all")
