"""What a forward gives for its rows: candidates found where the rows lie or inside the graph, and how much crosses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engines import batch_of, executor_over, loaded
from tiny_models import VOCAB, write_llama
from vocab_files import spm, write

from ggml_engine.control.config import GenConfig
from ggml_engine.control.draws import DrawPool
from ggml_engine.control.logprobs import candidate_logprobs, need_with_logprobs, token_logprobs
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.text import VocabularyText
from ggml_engine.errors import ExecutorError, InputError, OptionError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.best_rows import BestKey, BestRows
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml import backends, library
from ggml_engine.ggml.backends import Backend, Graph
from ggml_engine.ggml.candidates import WHOLE_ROW, RowNeed, best_of
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.ops import GraphBuilder
from ggml_engine.ggml.sampler import SamplerConfig
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.vocab import Vocabulary
from ggml_engine.models.model import Model

TOKENS: list[int] = np.random.default_rng(6).integers(3, VOCAB, 60).tolist()
PROMPT = [token % 250 + 5 for token in TOKENS[:9]]
PLACES = ["host", "graph"]
Row = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with loaded(write_llama(tmp_path_factory.mktemp("tiny") / "model.gguf"), threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> VocabularyText:
    with GGUFFile.open(write(tmp_path_factory.mktemp("v") / "v.gguf", spm(), n_rows=VOCAB)) as file:
        return VocabularyText(Vocabulary.load(file))


def needs() -> list[RowNeed]:
    n = VOCAB
    return [RowNeed(1, n), WHOLE_ROW, RowNeed(7, n), RowNeed(1, n), RowNeed(70, n), RowNeed(5, n, log_sum=True)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_candidates_are_those_of_the_rows(model: Model, place: Any, deterministic: bool) -> None:
    options: dict[str, Any] = {"capacity": 256, "deterministic": deterministic}
    with executor_over(model, **options) as plain, executor_over(model, candidates=place, **options) as executor:
        for wanted in (needs(), needs()[:1], [RowNeed(1, VOCAB - 9)] * 2, [RowNeed(9, VOCAB - 9), RowNeed(9, VOCAB)]):
            tokens = TOKENS[: len(wanted)]
            rows = plain.forward(batch_of([(plain.open(), tokens)]))
            outputs = executor.forward_outputs(batch_of([(executor.open(), tokens)]), wanted)
            for i, need in enumerate(wanted):
                found = outputs.candidates(i)
                assert outputs.row(i).tobytes() == rows[i].tobytes()
                if need == WHOLE_ROW:
                    assert found is None
                    continue
                expected = best_of(rows[i], need)
                assert found is not None
                assert (found.ids.tolist(), found.log_sum) == (expected.ids.tolist(), expected.log_sum)
                assert found.logits.tobytes() == expected.logits.tobytes()
                assert found.is_finite
            np.testing.assert_array_equal(outputs.rows(0, len(wanted)), rows)


@pytest.mark.parametrize("place", PLACES)
def test_a_row_can_be_asked_for_until_the_next_forward(model: Model, place: Any) -> None:
    with executor_over(model, capacity=256, candidates=place) as executor:
        sequence = executor.open()
        outputs = executor.forward_outputs(Batch.of_sequence(sequence, TOKENS[:4]), [RowNeed(1, VOCAB)])
        assert outputs.row(0).shape == (VOCAB,)
        executor.forward(Batch.of_sequence(sequence, TOKENS[4:5]))
        with pytest.raises(ExecutorError, match="row of logits"):
            outputs.row(0)


@pytest.mark.parametrize("bad", [[], [WHOLE_ROW] * 2, [RowNeed(1, VOCAB + 1)], [RowNeed(5, 4)], [RowNeed(-1, 5)]])
def test_needs_that_do_not_go_with_a_step_are_refused_with_nothing_changed(model: Model, bad: list[RowNeed]) -> None:
    with executor_over(model, capacity=256) as executor:
        sequence = executor.open()
        with pytest.raises(InputError, match="needed"):
            executor.forward_outputs(Batch.of_sequence(sequence, TOKENS[:4]), bad)
        assert (executor.length(sequence), executor.free_cells) == (0, executor.capacity)
    with pytest.raises(OptionError, match="candidates is auto, graph or host"):
        ExecutorOptions(candidates="device")  # type: ignore[arg-type]


def found_in_graph(rows: npt.NDArray[np.float32], wanted: list[RowNeed]) -> tuple[list[Any], int]:
    """What the nodes find in given rows, and how many rows had to be read."""
    key = BestKey.of(wanted)
    assert key is not None
    libraries = library.load()
    builder = GraphBuilder(libraries, 64)
    logits = builder.input("logits", TensorType.F32, rows.shape[1], rows.shape[0])
    best = BestRows(builder, logits, key)
    backend = Backend(libraries, backends.cpu_device(libraries), 1)
    graph = Graph(builder, [backend], "best rows")
    backends.set_data(libraries, logits, rows)
    graph.compute()
    read = []

    def read_row(i: int) -> Row:
        read.append(i)
        return rows[i]

    found, n_bytes = best.read(wanted, read_row)
    assert 0 < n_bytes <= len(rows) * (12 + 8 * min(rows.shape[1], key.n_best))
    graph.free()
    backend.free()
    return found, len(read)


@pytest.mark.parametrize("k", [1, 2, 40, 300])
def test_equal_logits_are_looked_at_in_the_row_and_the_first_of_them_taken(k: int) -> None:
    rng = np.random.default_rng(k)
    rows = rng.standard_normal((6, 300)).astype(np.float32)
    rows[1] = np.round(rows[1])
    rows[2] = 0
    rows[3, [50, 7, 290]] = 9
    wanted = [RowNeed(k, 300)] * len(rows)
    found, n_read = found_in_graph(rows, wanted)
    for row, best, need in zip(rows, found, wanted, strict=True):
        assert best.ids.tolist() == best_of(row, need).ids.tolist()
        assert best.logits.tobytes() == best_of(row, need).logits.tobytes()
    assert n_read in {1: {2, 3}, 2: {1}, 40: {1, 2}, 300: {0}}[k]  # of 300 nothing is left out


@pytest.mark.parametrize("k", [1, 9])
def test_rows_that_are_not_finite_are_known_as_such(k: int) -> None:
    rows = np.random.default_rng(3).standard_normal((5, 120)).astype(np.float32)
    rows[0, 5], rows[1, 119], rows[2, 0], rows[3, 3:5] = math.nan, math.inf, -math.inf, (math.inf, -math.inf)
    rows[4, 110:] = math.nan  # padding may hold anything
    found, _ = found_in_graph(rows, [RowNeed(k, 120)] * 4 + [WHOLE_ROW])
    assert [each is not None and each.is_finite for each in found] == [False] * 5
    found, n_read = found_in_graph(rows, [WHOLE_ROW] * 4 + [RowNeed(k, 110)])
    assert found[4].ids.tolist() == best_of(rows[4], RowNeed(k, 110)).ids.tolist()
    assert n_read == 0


# ---- through a runner


def generated(model: Model, text: VocabularyText, configs: list[GenConfig], place: Any, **options: Any) -> list[Any]:
    executor = GgmlExecutor(model, ExecutorOptions(capacity=1024, deterministic=True, candidates=place))
    with Runner(executor, text, RunnerOptions(**options)) as runner:
        sessions = [runner.open_session() for _ in configs]
        handles = [s.generate_async(PROMPT, c, max_tokens=24) for s, c in zip(sessions, configs, strict=True)]
        for handle in handles:
            handle.result(60)
        found = [(handle.tokens, handle.logprobs) for handle in handles]
    executor.close_all()
    return found


def configs(**options: Any) -> list[GenConfig]:
    """Greedy, candidates and whole rows, each with a seed of its own."""
    samplers: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 0}, {"mirostat": 2}, {"repeat_penalty": 1.3}]
    samplers += [{"top_n_sigma": 2.0}, {"temperature": 0.0, "presence_penalty": 0.4}]
    return [
        GenConfig(sampler=SamplerConfig(seed=seed, **each), ignore_eos=True, **options)
        for seed, each in enumerate(samplers)
    ]


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_tokens_and_logprobs_are_those_of_whole_rows_wherever_candidates_are_found(
    model: Model, text: VocabularyText, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    wanted = configs(logprobs=logprobs)
    found = [generated(model, text, wanted, place) for place in PLACES]
    monkeypatch.setattr("ggml_engine.ggml.sampler.need_of", lambda *_: WHOLE_ROW)
    whole = generated(model, text, wanted, "host")
    assert found == [whole, whole]
    assert all(len(tokens) == 24 for tokens, _ in whole)


def test_threads_that_draw_change_no_token(model: Model, text: VocabularyText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggml_engine.control.scheduler.LEAST_WIDTH", 1)
    n_together: list[int] = []
    run = DrawPool.run

    def counted(pool: DrawPool, calls: Any) -> Any:
        n_together.append(len(calls))
        return run(pool, calls)

    monkeypatch.setattr(DrawPool, "run", counted)
    alone = generated(model, text, configs(), "host", sampling_threads=1)
    assert not n_together
    assert generated(model, text, configs(), "host", sampling_threads=3) == alone
    assert max(n_together) == 3


def test_a_draw_that_fails_fails_its_own_generation(
    model: Model, text: VocabularyText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggml_engine.control.scheduler.LEAST_WIDTH", 1)
    run = DrawPool.run
    monkeypatch.setattr(DrawPool, "run", lambda pool, calls: [InputError("nothing is left"), *run(pool, calls[1:])])
    wanted = GenConfig(sampler=SamplerConfig(top_k=0, seed=1), ignore_eos=True)
    executor = GgmlExecutor(model, ExecutorOptions(capacity=1024))
    with Runner(executor, text, RunnerOptions(sampling_threads=2)) as runner:
        sessions = [runner.open_session() for _ in range(2)]
        handles = [session.generate_async(PROMPT, wanted, max_tokens=200) for session in sessions]
        for handle in handles:
            handle.wait(60)
        assert sorted(type(handle.error) for handle in handles if handle.error) == [InputError]
        assert max(len(handle.tokens) for handle in handles) == 200
    executor.close_all()


def test_results_and_errors_of_a_pool_come_in_order() -> None:
    def fail() -> int:
        raise ValueError("no")

    for n_threads in (1, 2, 4):
        pool = DrawPool(n_threads)
        found = pool.run([lambda: 1, fail, lambda: 3, lambda: 4])
        assert (found[0], found[2:]) == (1, [3, 4])
        assert isinstance(found[1], ValueError)
        assert pool.run([]) == []
        pool.close()
        pool.close()


@pytest.mark.parametrize(
    ("config", "place", "least", "most"),
    [
        (SamplerConfig.greedy(), "host", 8, 8),
        (SamplerConfig.greedy(), "graph", 16, 64),
        (SamplerConfig(top_k=40, seed=1), "host", 41 * 8, 41 * 8),
        (SamplerConfig(top_k=40, seed=1), "graph", 41 * 8, 600),
        (SamplerConfig(top_k=0, seed=1), "host", VOCAB * 4, VOCAB * 4),
        (SamplerConfig(top_k=0, seed=1), "graph", VOCAB * 4, VOCAB * 4),
    ],
)
def test_no_more_of_a_row_crosses_into_python_than_its_sampler_needs(
    model: Model, text: VocabularyText, config: SamplerConfig, place: Any, least: int, most: int
) -> None:
    executor = GgmlExecutor(model, ExecutorOptions(capacity=256, candidates=place))
    with Runner(executor, text) as runner:
        wanted = GenConfig(sampler=config, ignore_eos=True)
        session = runner.open_session()
        handle = session.generate_async(PROMPT, wanted, max_tokens=20)
        handle.result(60)
        assert len(handle.tokens) == 20
        n_bytes = executor.stats()["result_bytes"]
    executor.close_all()
    assert 20 * least <= n_bytes <= 20 * most


def test_logprobs_by_candidates_are_those_of_the_row() -> None:
    row = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    row[[7, 9]] = 4
    for n_top in (0, 1, 2, 20):
        need = need_with_logprobs(RowNeed(1, 500), n_top, 500)
        best = best_of(row, need)
        for token in best.ids.tolist():
            assert candidate_logprobs(best, token, n_top) == token_logprobs(row, token, n_top)
        assert candidate_logprobs(best, int(row.argmin()), n_top) is None
    assert need_with_logprobs(RowNeed(1, 480), 2, 500) == WHOLE_ROW  # they are of padding, too
    assert need_with_logprobs(WHOLE_ROW, 2, 500) == WHOLE_ROW


def test_steps_of_other_options_share_graphs() -> None:
    assert BestKey.of([RowNeed(41, 500)]) == BestKey.of([RowNeed(20, 500), RowNeed(41, 500), WHOLE_ROW])
    assert BestKey.of([RowNeed(41, 500)]) == BestKey.of([RowNeed(60, 500), RowNeed(1, 500)])
    assert BestKey.of([WHOLE_ROW]) is None
