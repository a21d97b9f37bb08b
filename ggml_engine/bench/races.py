"""The cases in which ours and llama.cpp's modes do the same steps: prefill, and decode of one or many sequences.

Random ids, no sampling, one synchronisation per step; in each repetition everyone takes a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ggml_engine.bench.driver import Driver, Room
from ggml_engine.bench.measure import Contestant, interleave
from ggml_engine.bench.report import ModelReport, Row
from ggml_engine.bench.setting import Setting, fitting


def prefill(setting: Setting, report: ModelReport) -> None:
    """Read prompts of several lengths from nothing."""
    for n in sorted(set(setting.sizes.prompts)):
        row = _race(setting, report, "prefill", f"{n} tokens")
        tokens = setting.tokens(n)
        with setting.drivers(Room(1, n), row.skipped) as drivers:
            _run(
                setting, row, drivers, n,
                reset=lambda driver: driver.clear(),
                run=lambda driver, tokens=tokens: driver.prefill(0, tokens),  # type: ignore[misc]
            )  # fmt: skip


def decode(setting: Setting, report: ModelReport) -> None:
    """Decode one sequence after histories of several lengths; a history is grown, not read anew for each row."""
    steps = setting.sizes.steps_of(1)
    histories = sorted(set(setting.sizes.histories))
    possible = fitting(histories, setting.n_ctx - steps)
    rows = {n: _race(setting, report, "decode", f"1 sequence at {n}") for n in histories}
    for n in set(histories) - set(possible):
        rows[n].skipped["ours"] = setting.too_long(n + steps)
    if not possible:
        return
    skipped: dict[str, str] = {}
    history = setting.tokens(possible[-1])
    with setting.drivers(Room(1, possible[-1] + steps), skipped) as drivers:
        length = 0
        for n in possible:
            rows[n].skipped |= skipped
            if n > length:
                _prepare(setting, rows[n], drivers, lambda driver, a=length, b=n: driver.prefill(0, history[a:b]))  # type: ignore[misc]
            length = n
            _decode(setting, rows[n], drivers, 1, n, steps)


def separate(setting: Setting, report: ModelReport) -> None:
    """Decode several sequences with histories of their own, in one step."""
    sizes = setting.sizes
    n = sizes.width_history
    widths = sorted(set(sizes.widths))
    label = "{} sequences at {}"
    rows = {width: _race(setting, report, "separate", label.format(width, n)) for width in widths}
    skipped: dict[str, str] = {}
    room = Room(widths[-1], n + max(map(sizes.steps_of, widths)))
    with setting.drivers(room, skipped) as drivers:
        for width in widths:
            row = rows[width]
            row.skipped |= skipped

            def grow(driver: Driver, width: int = width) -> None:
                if width == widths[0]:
                    driver.prefill(0, setting.tokens(n))
                driver.copy(width)

            _prepare(setting, row, drivers, grow)
            _decode(setting, row, drivers, width, n, sizes.steps_of(width))


def shared(setting: Setting, report: ModelReport) -> None:
    """Decode several sequences on a prefix that they share, after some tokens of their own."""
    sizes = setting.sizes
    for width in sorted(set(sizes.shared_widths)):
        steps = sizes.steps_of(width)
        row = _race(setting, report, "shared", f"{width} sequences on {sizes.shared_prefix}")
        with setting.drivers(Room(width, sizes.shared_own + steps, sizes.shared_prefix), row.skipped) as drivers:

            def begin(driver: Driver, width: int = width) -> None:
                driver.prefill(0, setting.tokens(sizes.shared_prefix))
                driver.share(width)
                for i in range(width):
                    driver.prefill(i, setting.tokens(sizes.shared_own, 1 + i))

            _prepare(setting, row, drivers, begin)
            _decode(setting, row, drivers, width, sizes.shared_prefix + sizes.shared_own, steps)


def _race(setting: Setting, report: ModelReport, case: str, label: str) -> Row:
    row = report.row(case, label, is_race=True)
    mode = setting.defaults()
    row.defaults = mode.name if mode else ""
    return row


def _prepare(setting: Setting, row: Row, drivers: Sequence[Driver], prepare: Callable[[Driver], object]) -> None:
    for driver in drivers:
        setting.progress(f"{row.case}, {row.label}: preparing {driver.name}")
        prepare(driver)


def _decode(setting: Setting, row: Row, drivers: Sequence[Driver], width: int, length: int, steps: int) -> None:
    tokens = setting.tokens(width * steps, 1000).reshape(steps, width)

    def run(driver: Driver) -> None:
        for each in tokens:
            driver.decode(each)

    _run(setting, row, drivers, width * steps, reset=lambda driver: driver.rewind([length] * width), run=run)
    for driver in drivers:
        driver.rewind([length] * width)


def _run(
    setting: Setting,
    row: Row,
    drivers: Sequence[Driver],
    n_tokens: int,
    *,
    reset: Callable[[Driver], object],
    run: Callable[[Driver], object],
) -> None:
    series = [row.add(driver.name, "s", n_tokens) for driver in drivers]
    contestants = [Contestant(each.name, _bound(reset, each), _bound(run, each)) for each in drivers]
    done = -1

    def tell() -> None:
        nonlocal done
        done += 1
        setting.progress(f"{row.case}, {row.label}: {done} of {setting.repetitions} repetitions")

    if contestants:
        interleave(contestants, setting.repetitions, into=[each.values for each in series], on_repetition=tell)


def _bound(action: Callable[[Driver], object], driver: Driver) -> Callable[[], object]:
    return lambda: action(driver)
