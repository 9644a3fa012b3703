"""The receipt of a job: one HTML page without references to other files."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from accordion_hvd.engine.ledger.summary import (
    Found,
    Summary,
    advice,
    compressed,
    critical,
    duration,
    mbit,
    ms,
    percent,
    size,
    steps_of,
    summarize,
    timeline,
)

TEMPLATE = Path(__file__).with_name("receipt.html")

PARTS = {
    "compute": ("c0", "forward and backward pass, optimizer, input, all else outside of exchanges"),
    "encode": ("c1", "compressing gradients, before the first messages"),
    "wait": ("c2", "exposed: the training thread only waits for messages"),
    "decode": ("c3", "decompressing and averaging what was received"),
    "decide": ("c4", "decisions of the policy, comparisons of replicas"),
    "graph": ("c5", "exchanges within graphs, waiting included"),
    "measure": ("c7", "rehearsals for this receipt, which are no part of the step"),
}
"""Color and meaning of each part of the time of a step."""

LEVELS = ("c3", "c1", "c5", "c4", "c6", "c2", "c7")
"""Colors of compressors and lines."""

COLUMNS, LANES, LINES, RANKS = 90, 40, 6, 16
"""Largest numbers of columns, lanes, lines and ranks that charts show."""


def page(found: Found) -> str:
    """Return the receipt of a ledger's records (`Ledger.as_dict`) as HTML."""
    summary, job = summarize(found), found["job"]
    sections = [
        _time(found, summary), _bytes(found, summary), _levels(found), _regimes(found),
        _rank_section(summary), _errors(found), _events(found), _notes(found, summary),
    ]  # fmt: skip
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(job["began"]))
    subtitle = (
        f"{summary.steps:,} steps on {job['ranks']} ranks over {job['engine']}, begun {began} on "
        f"{job['host']}, {duration(job['until'] - job['began'])}. Policy: {job['policy']}."
    )
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title="Receipt of communication",
        hatches=hatches(),
        subtitle=escape(subtitle),
        cards="".join(_cards(summary)),
        advice="".join(f"<li>{escape(text)}</li>" for text in advice(summary)),
        sections="\n".join(section for section in sections if section),
    )


def _cards(summary: Summary) -> Iterator[str]:
    yield _card(percent(summary.share), f"of a step of {ms(summary.seconds)} is communication")
    sent = f"{size(summary.sent)} instead of {size(summary.dense)} per step and rank"
    yield _card(f"{summary.ratio:.3g} x", f"fewer bytes: {sent}")
    if summary.bought is not None:
        at = f" at {mbit(statistics.median(summary.rates))}" if summary.rates else ""
        yield _card(*_gain(summary.bought, duration), f"against uncompressed gradients{at}")
        if summary.price is not None:
            paid = summary.price * summary.total / 3600
            low, high = (summary.price * x / 3600 for x in summary.bought)
            text = f"in money; the job has cost {paid:,.4g}"
            yield _card(*_gain((low, high), "{:,.4g}".format), text)
    slowest = summary.slowest
    if slowest is not None and len(summary.ranks) > 1:
        more = f"the slowest: works {ms(summary.delay)} longer per step than the median rank"
        yield _card(f"rank {slowest.number}", more)


def _gain(bounds: tuple[float, float], text: Callable[[float], str]) -> tuple[str, str]:
    low, high = bounds
    if low < 0 < high:
        return "saved or lost?", f"between {text(-low)} lost and {text(high)} saved, estimated "
    least, most = sorted(map(abs, bounds))
    figure = text(least) if text(least) == text(most) else f"{text(least)} to {text(most)}"
    return f"{figure} {'saved' if high > 0 else 'lost'}", "estimated, "


def _card(figure: str, *texts: str) -> str:
    return f"<div><b>{escape(figure)}</b><span>{escape(''.join(texts))}</span></div>"


# ----------------------------------------------------------------------------------------- sections
def _time(found: Found, summary: Summary) -> str:
    used = _colors(summary)
    columns = _columns(found, {part: 1e3 for part in used})
    table = _table(
        ["part", "ms per step", "share", "meaning"],
        [
            [part, f"{1e3 * value:.3g}", percent(value / summary.seconds), PARTS[part][1]]
            for part, value in summary.parts.items()
            if value
        ],
        left=(0, 3),
    )
    chart = stacked(columns, used, "ms")
    return _section("Where the time of a step went", legend(used), _figure(chart), table)


def _bytes(found: Found, summary: Summary) -> str:
    text = (
        f"A rank sends {size(summary.sent)} per step; a ring allreduce of uncompressed gradients "
        f"sends {size(summary.dense)}. In the whole job, a rank has sent "
        f"{size(summary.sent * summary.steps)} instead of {size(summary.dense * summary.steps)}."
    )
    rows = sorted(found["groups"].items(), key=lambda item: -item[1]["flight"])[:20]
    table = _table(
        ["fusion group", "steps", "sent per step", "rounds", "ms in flight", "ms encode",
         "ms decode"],
        [
            [label, f"{row['steps']:,.0f}", size(row["sent"] / row["steps"]),
             f"{row['rounds'] / row['steps']:.3g}",
             *(f"{1e3 * row[key] / row['steps']:.3g}" for key in ("flight", "encode", "decode"))]
            for label, row in rows
        ],
    )  # fmt: skip
    columns = _columns(found, {"sent": 1e-6})
    chart = _figure(stacked(columns, {"sent": "c6"}, "MB"))
    return _section("Bytes", f"<p>{escape(text)}</p>", chart, table if rows else "")


def _levels(found: Found) -> str:
    spans = timeline(found)
    texts = list(dict.fromkeys(text for row in spans.values() for _, _, text in row))
    if not spans:
        return ""
    colors = dict(zip(texts, itertools.cycle(LEVELS), strict=False))
    shown = dict(itertools.islice(spans.items(), LANES))
    more = len(spans) - len(shown)
    note = f"<p class='soft'>{more} more layers are in ledger.json.</p>" if more else ""
    chart = _figure(lanes(shown, colors, steps_of(found)))
    return _section("Levels by layer", legend(colors), chart, note)


def _regimes(found: Found) -> str:
    spans, decisions = critical(found), [row for row in found["decisions"] if row["norm"]]
    if not decisions:
        return ""
    layers = len(compressed(found))
    parts = []
    if spans:
        texts = [
            f"steps {first:,} to {end:,}: {f'all {layers}' if count == layers else count or 'no'} "
            f"{'layer' if count == 1 else 'layers'}"
            for first, end, count in spans
        ]
        shown = "; ".join(texts[:12]) + ("; ..." if len(texts) > 12 else "")
        parts.append(f"<p>Critical layers: {escape(shown)}.</p>")
    buckets = found["job"]["buckets"]
    largest = sorted({row["name"] for row in decisions} & set(buckets),
                     key=lambda name: -buckets[name]["dense"])[:LINES]  # fmt: skip
    rows: dict[str, list[tuple[int, float, bool, str]]] = {name: [] for name in largest}
    for row in decisions:
        if row["name"] in rows:
            text = f"norm {row['norm']:.4g}, {row['reason']}"
            rows[row["name"]].append((row["step"], row["norm"], row["level"] == 0, text))
    if rows:
        parts.append(legend(dict(zip(rows, LEVELS, strict=False)), "line"))
        caption = "Evidence of each decision (logarithmic), normally the norm of a window's sum of "
        caption += "gradients. Outlined dots: decisions for low compression."
        parts.append(_figure(lines(rows, LEVELS, steps_of(found)), caption))
    table = _table(
        ["layer", "step", "level", "reason", "norm", "before", "change"],
        [
            [row["name"], str(row["step"]), row["compressor"] or str(row["level"]), row["reason"],
             *(_number(row[key]) for key in ("norm", "previous", "change"))]
            for row in decisions[-200:]
        ],
        left=(0, 2, 3),
    )  # fmt: skip
    parts.append(f"<details><summary>Decisions (the last {min(len(decisions), 200)})</summary>")
    return _section("Decisions and critical regimes", *parts, table, "</details>")


def _rank_section(summary: Summary) -> str:
    ranks = summary.ranks
    if len(ranks) < 2:
        return ""
    slowest = sorted(ranks, key=lambda rank: -rank.own)[:RANKS]
    shown = sorted(slowest, key=lambda rank: rank.number)
    used = _colors(summary)
    rows = [
        (f"rank {rank.number}", {part: 1e3 * rank.parts[part] for part in used}) for rank in shown
    ]
    table = _table(
        ["rank", "ms of own work", "ms waiting", "sent over TCP", "slowest connection", "to",
         "round trip"],
        [
            [str(rank.number), f"{1e3 * rank.own:.3g}", f"{1e3 * rank.parts['wait']:.3g}",
             size(rank.wire), mbit(rank.rate) if rank.rate else "-", rank.peer or "-",
             ms(rank.rtt) if rank.rtt else "-"]
            for rank in shown
        ],
    )  # fmt: skip
    text = "Means per step. A rank that hardly waits is the one for which the others wait."
    if len(shown) < len(ranks):
        text += f" Shown are the {len(shown)} slowest of {len(ranks)} ranks."
    chart = _figure(bars(rows, used, "ms"))
    return _section("Ranks", f"<p>{text}</p>", legend(used), chart, table)


def _errors(found: Found) -> str:
    errors = found["errors"]
    rows = []
    for name, samples in errors["buckets"].items():
        *_, (_, norm, residual, last) = samples
        known = [error for *_, error in samples if error is not None]
        mean = sum(known) / len(known) if known else None
        rows.append([name, str(len(samples)), _number(norm), _number(residual), _share(last),
                     _share(mean)])  # fmt: skip
    parts = []
    if rows:
        text = (
            "A compressor receives x = gradient + residual and sends C(x). The relative error is "
            "|x - C(x)| / |x|. With error feedback, x - C(x) is not lost but added to the next "
            "gradient, so errors near 100 % are normal for strong compression."
        )
        header = ["layer", "samples", "|x|", "|residual|", "last error", "mean error"]
        parts += [f"<p>{text}</p>", _table(header, rows[:LANES])]
    shadows = [
        [name, f"{sums['dense'] / sums['sent']:.3g} x" if sums["sent"] else "-",
         _share((sums["error"] / sums["norm"]) ** 0.5 if sums["norm"] else None)]
        for name, sums in errors["shadows"].items()
    ]  # fmt: skip
    if shadows:
        text = "Shadow compressors received the same x in the same steps, and sent nothing."
        header = ["shadow", "fewer bytes", "relative error"]
        parts += [f"<p>{text}</p>", _table(header, shadows)]
    return _section("Errors of compression", *parts) if parts else ""


def _events(found: Found) -> str:
    texts = {
        "skipped": "skipped, because a gradient was not finite or too large",
        "guard": "replicas differed",
        "ranks": "the number of ranks became ",
    }
    rows = [
        [str(event["step"]), f"{texts[event['kind']]}{event.get('ranks', '')}"]
        for event in found["events"]
        if event["kind"] in texts
    ]
    gate = f"<p>{escape(found['gate'])}</p>" if found["gate"] else ""
    table = _table(["step", "event"], rows[:100], left=(1,)) if rows else ""
    return _section("Events", gate, table) if gate or table else ""


def _notes(found: Found, summary: Summary) -> str:
    texts = [
        "Times are those of the training thread of rank 0, between the ends of two exchanges; they "
        "add up to the duration of the training. Evaluations and checkpoints count as compute. On "
        "GPUs, a call may return before its kernels have run, so waiting includes their time.",
        "Bytes are counted by a model of ring allreduce and allgather, without headers and without "
        "the engine's control messages. “Sent over TCP” is what the kernel has counted.",
        "The times of steps with other exchanges are estimates: from time to time, the job's own "
        "exchange and the others were run in turn with made-up gradients, and the differences are "
        "added to the mean step. Ranges are those of four out of five turns, widened by how much "
        "the mean step has changed during the job.",
    ]  # fmt: skip
    if summary.parts["graph"]:
        texts.append(
            "Exchanges within TensorFlow graphs are timed as a whole: their encoding, waiting and "
            "decoding, fusion groups and errors are not known."
        )
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    version = f"accordion_hvd {found['job']['version']}"
    return _section("How this was measured", f"<ul class='soft'>{items}</ul>",
                    f"<p class='soft'>{escape(version)}</p>")  # fmt: skip


# --------------------------------------------------------------------------------------------- HTML
def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _figure(chart: str, caption: str = "") -> str:
    text = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{chart}</figure>{text}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    sides = [" class='left'" if i in left else "" for i in range(len(header))]

    def line(kind: str, cells: Sequence[str]) -> str:
        pairs = zip(sides, cells, strict=True)
        return f"<tr>{''.join(f'<{kind}{side}>{escape(x)}</{kind}>' for side, x in pairs)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<div class='table'><table>{line('th', header)}{body}</table></div>"


def _colors(summary: Summary) -> dict[str, str]:
    return {part: color for part, (color, _) in PARTS.items() if summary.parts[part]}


def _columns(
    found: Found, scales: Mapping[str, float]
) -> list[tuple[str, float, dict[str, float]]]:
    names, rows = list(found["steps"]), list(zip(*found["steps"].values(), strict=True))
    span, end, columns = -(-len(rows) // COLUMNS), 0, []
    for i in range(0, len(rows), span):
        row = dict(zip(names, map(sum, zip(*rows[i : i + span], strict=True)), strict=True))
        began, end = end + 1, end + int(row["steps"])
        means = {name: scale * row[name] / row["steps"] for name, scale in scales.items()}
        columns.append((f"steps {began} to {end}", row["steps"], means))
    return columns


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


# ------------------------------------------------------------------------------------------- charts
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
