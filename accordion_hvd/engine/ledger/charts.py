"""Charts of a receipt: SVG that needs no program, whose marks have texts to hover (`data-tip`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT = 400, 92, 12
"""Width of a chart and of its margins, in user units; the page scales charts."""

HATCHES = (
    "",
    "M0 6 6 0",
    "M0 0 6 6M0 6 6 0",
    "M0 3H6",
    "M2 3H4",
    "M3 0V6",
    "M0 0 6 6",
    "M0 3H6M3 0V6",
)
"""Paths of the hatches that tell colors apart without seeing them, in squares of 6 units."""

INNER = WIDTH - LEFT - RIGHT


def stacked(
    rows: Sequence[tuple[str, float, Mapping[str, float]]], colors: Mapping[str, str], unit: str
) -> str:
    """Return columns of stacked parts, from left to right.

    Args:
        rows: title, number of steps (the width of the column), and heights by part.
        colors: CSS class of each part, from the bottom to the top.
    """
    height, bottom = 220, 190
    most = max((sum(parts.values()) for _, _, parts in rows), default=0.0) or 1.0
    ticks, scale = _ticks(most), 165
    top = ticks[-1]
    marks = [_horizontal(bottom - scale * t / top, f"{t:g} {unit}") for t in ticks]
    total, x = sum(width for _, width, _ in rows) or 1.0, float(LEFT)
    for title, width, parts in rows:
        wide, y = INNER * width / total, float(bottom)
        lines = [title, *(f"{name}: {parts[name]:.3g} {unit}" for name in colors if parts[name])]
        for name, color in colors.items():
            tall = scale * parts[name] / top
            y -= tall
            if tall > 0:
                marks.append(_box(x, y, max(wide - 0.5, 0.5), tall, color, lines))
        x += wide
    marks.append(_text(LEFT, height - 8, "first step", "start"))
    marks.append(_text(WIDTH - RIGHT, height - 8, "last step", "end"))
    return _svg(height, marks)


def bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str], unit: str
) -> str:
    """Return one horizontal bar of stacked parts for each row; see `stacked`."""
    most = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    marks = []
    for number, (title, parts) in enumerate(rows):
        x, y = float(LEFT), 4 + 24 * number
        marks.append(_text(LEFT - 8, y + 13, title, "end"))
        for name, color in colors.items():
            wide = (INNER - 80) * parts[name] / most
            if wide > 0:
                tip = [title, f"{name}: {parts[name]:.3g} {unit}"]
                marks.append(_box(x, y, wide, 18, color, tip))
            x += wide
        marks.append(_text(x + 6, y + 13, f"{sum(parts.values()):.3g} {unit}", "start"))
    return _svg(8 + 24 * len(rows), marks)


def lanes(
    rows: Mapping[str, Sequence[tuple[int, int, str]]], colors: Mapping[str, str], last: int
) -> str:
    """Return a lane for each row; spans (first step, end, text) have the color of the text."""
    marks = []
    for number, (name, spans) in enumerate(rows.items()):
        y = 4 + 18 * number
        marks.append(_text(LEFT - 8, y + 11, _short(name), "end"))
        for began, end, text in spans:
            x, wide = LEFT + INNER * began / last, INNER * (end - began) / last
            tip = [name, f"steps {began} to {end}", text]
            marks.append(_box(x, y, max(wide - 1, 0.5), 14, colors[text], tip))
    height = 8 + 18 * len(rows)
    return _svg(height + 18, [*marks, *_steps(height + 12, last)])


def lines(
    rows: Mapping[str, Sequence[tuple[int, float, bool, str]]], colors: Sequence[str], last: int
) -> str:
    """Return lines over steps, with a logarithmic scale.

    Args:
        rows: name of each line, and its points: step, positive value, whether the point is
            emphasized, and the text to hover.
        colors: CSS classes of the lines.
    """
    values = [math.log10(value) for points in rows.values() for _, value, _, _ in points]
    low, high = math.floor(min(values)), math.ceil(max(values))
    high, bottom, scale = max(high, low + 1), 190, 170

    def place(step: int, value: float) -> tuple[float, float]:
        share = (math.log10(value) - low) / (high - low)
        return LEFT + INNER * step / last, bottom - scale * share

    marks = [_horizontal(place(0, 10.0**e)[1], f"{10.0**e:g}") for e in range(low, high + 1)]
    for (name, points), color in zip(rows.items(), colors, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(p[0], p[1]) for p in points))
        marks.append(f'<polyline class="line {color}" points="{path}"/>')
        for step, value, strong, text in points:
            x, y = place(step, value)
            kind = "strong" if strong else "dot"
            tip = _tip([name, f"step {step}", text])
            marks.append(
                f'<circle class="{kind} b{color[1:]}" cx="{x:.1f}" cy="{y:.1f}" '
                f'r="{4 if strong else 2.5}" {tip}/>'
            )
    return _svg(220, [*marks, *_steps(212, last)])


def legend(colors: Mapping[str, str], kind: str = "box") -> str:
    """Return the names of colors, each beside a sample: a "box" or a "line"."""
    samples = {
        "box": '<rect class="{}" width="22" height="12"/>',
        "line": '<polyline class="line {}" points="0,6 22,6"/>',
    }
    items = (
        f'<span><svg viewBox="0 0 22 12">{samples[kind].format(c)}</svg>{escape(name)}</span>'
        for name, c in colors.items()
    )
    return f'<p class="legend">{"".join(items)}</p>'


def hatches() -> str:
    """Return the fills of all charts, `h0` to `h7`, for colors `c0` to `c7`."""
    fills = (
        f'<pattern id="h{i}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect class="b{i}" width="6" height="6"/><path d="{path}"/></pattern>'
        for i, path in enumerate(HATCHES)
    )
    return f'<svg class="fills"><defs>{"".join(fills)}</defs></svg>'


# -------------------------------------------------------------------------------------------- marks
def _svg(height: float, marks: Sequence[str]) -> str:
    body = "\n".join(marks)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">\n{body}\n</svg>'


def _box(x: float, y: float, wide: float, tall: float, color: str, lines: Sequence[str]) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
    return f'<rect class="{color}" {size} {_tip(lines)}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _horizontal(y: float, label: str) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 8, y + 4, label, "end")


def _steps(y: float, last: int) -> list[str]:
    marks = (0, last // 4, last // 2, 3 * last // 4, last)
    places = [LEFT + INNER * mark / last for mark in marks]
    anchors = ("start", "middle", "middle", "middle", "end")
    return [
        _text(x, y, f"{'step ' if not mark else ''}{mark:,}", anchor)
        for x, mark, anchor in zip(places, marks, anchors, strict=True)
    ]


def _tip(lines: Sequence[str]) -> str:
    return f'data-tip="{escape(chr(10).join(lines))}"'


def _short(name: str, most: int = 14) -> str:
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


def _ticks(most: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10(most))
    step = next(power * x for x in (0.2, 0.5, 1, 2) if power * x * 5 >= most)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]
