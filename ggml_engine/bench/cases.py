"""The cases by name, in the order in which they run, and the run of some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from ggml_engine.bench.cells import clone, parked
from ggml_engine.bench.overhead import python
from ggml_engine.bench.races import decode, prefill, separate, shared
from ggml_engine.bench.report import ModelReport
from ggml_engine.bench.serving import stream, warm
from ggml_engine.bench.setting import Setting
from ggml_engine.bench.start import start
from ggml_engine.errors import EngineError, OptionError

Case = Callable[[Setting, ModelReport], None]

CASES: Final[dict[str, Case]] = {
    "prefill": prefill,
    "decode": decode,
    "separate": separate,
    "shared": shared,
    "parked": parked,
    "clone": clone,
    "warm": warm,
    "stream": stream,
    "python": python,
    "start": start,
}


def choose(names: Iterable[str]) -> list[str]:
    """The named cases in the order of the run; all of them for no names. Raises OptionError for other names."""
    wanted = set(names)
    if unknown := sorted(wanted - set(CASES)):
        raise OptionError(f"there is no case {', '.join(unknown)}; the cases are {', '.join(CASES)}")
    return [name for name in CASES if not wanted or name in wanted]


def run(
    setting: Setting, report: ModelReport, names: Iterable[str], on_case: Callable[[str], object] = lambda _name: None
) -> None:
    """Run cases, and tell of each that is done; what one fails with is noted, and others go on.

    What was loaded is released, whatever ends it. Raises as `load_model`.
    """
    try:
        report.about |= describe_model(setting)
        for name in names:
            try:
                CASES[name](setting, report)
            except EngineError as error:
                report.failed[name] = str(error)
            on_case(name)
    finally:
        setting.release()


def describe_model(setting: Setting) -> dict[str, object]:
    """What a model is, for JSON. Raises as `load_model`."""
    hp = setting.model.hp
    return {
        "file": str(setting.path),
        "file_bytes": setting.path.stat().st_size,
        "architecture": hp.architecture,
        "n_layer": hp.n_layer,
        "n_embd": hp.n_embd,
        "n_vocab": hp.n_vocab,
        "n_ctx": setting.n_ctx,
    }
