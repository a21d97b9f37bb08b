"""LoRA adapters: logits are libllama's, sequences of different adapters share nothing, and what is freed is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import EVERY_MATRIX, AdaptedOracle, adapter_forge, tokens_of, write_adapter
from architecture_rows import ROWS, model_file
from engines import Logits, batch_of, executor_over, feed, loaded, running
from forged_models import taken_apart
from libllama import Type
from tiny_models import write_gemma3, write_llama

from ggml_engine.errors import InputError, OptionError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.models.adapter import Adapter, load_adapter
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet
from ggml_engine.models.model import Model
from ggml_engine.models.registry import ARCHITECTURES
from ggml_engine.models.weights import Role

N_CELLS = 512
FORMS: dict[str, dict[str, Any]] = {
    "matmul": {"attention": "matmul", "v_layout": "columns", "k_type": "f32", "v_type": "f32"},
    "flash": {"attention": "flash", "v_layout": "rows", "k_type": "f16", "v_type": "f16"},
}
PLAIN = FORMS["matmul"]
PROMPT = tokens_of(1, 40)

# model: whether its embedding can be changed beside libllama, which gives a tied one to the output as well and dies
MODELS = {
    "llama": True,
    "gemma3": False,
    "qwen2": True,
    "qwen2 fused": True,
    "qwen2moe": True,
    "llama experts": True,
    "gemma4 split experts, some dense layers, shared layers": False,
    "minicpm": False,
}

NOT_IN_LIBLLAMA = {
    "gemma4": r"^per_layer_model_proj\.",
    "deepseek2": r"\.attn_(q|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)\.|^output\.",
}


@contextmanager
def beside(path: Path, form: str = "matmul") -> Iterator[tuple[GgmlExecutor, AdaptedOracle]]:
    """The executor and libllama at equal geometry, as in test_architectures."""
    options = FORMS[form]
    kinds = {f"type_{letter}": Type[options[f"{letter}_type"].upper()] for letter in "kv"}
    oracle = AdaptedOracle(path, n_ctx=N_CELLS, flash=form == "flash", use_extra_bufts=True, **kinds)
    with oracle, running(path, capacity=N_CELLS, run=1, **options) as executor:
        yield executor, oracle


@contextmanager
def adapter_of(executor: GgmlExecutor, path: Path) -> Iterator[Adapter]:
    """A loaded adapter; at the end its sequences are closed."""
    adapter = load_adapter(executor.model, path)
    try:
        yield adapter
        for sequence in executor.cache.open_sequences:
            executor.close(sequence)
        executor.drop_adapter(adapter)
    finally:
        executor.graphs.clear()
        adapter.free()


def scaled(*pairs: tuple[Adapter, float]) -> AdapterSet:
    return AdapterSet.of(pairs)


def changeable(model: Model) -> list[str]:
    """The matrices that libllama lets an adapter change: not those that it multiplies without asking for one."""
    specs = [spec for spec in model.architecture.tensors(model.hp) if spec.role in {Role.MATMUL, Role.EXPERTS}]
    of_file = [spec.name for spec in specs if len(spec.shape) > 1 and spec.name in model.file.tensors]
    left_out = NOT_IN_LIBLLAMA.get(model.hp.architecture)
    return [name for name in of_file if left_out is None or not re.search(left_out, name)]


def same(found: Logits, expected: Logits) -> bool:
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    return found.tobytes() == expected.tobytes()


def apart(a: Logits, b: Logits) -> float:
    """How far two runs are from each other, in the spread of logits."""
    return float(np.abs(a - b).mean() / b.std())


class TestLogits:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", MODELS)
    def test_are_libllamas(self, tmp_path: Path, name: str, form: str) -> None:
        path = model_file(name)
        names = rf"{EVERY_MATRIX}|^token_embd\.weight$" if MODELS[name] else EVERY_MATRIX
        file = write_adapter(tmp_path / "a.gguf", path, names=names)
        with beside(path, form) as (ours, theirs), adapter_of(ours, file) as adapter:
            plain = theirs.append([(0, PROMPT)])
            theirs.restart()
            theirs.adapt((file, 0.7))
            first, second = (ours.open(scaled((adapter, 0.7))) for _ in range(2))
            found, expected = ours.forward(batch_of([(first, PROMPT)])), theirs.append([(0, PROMPT)])
            assert same(found, expected)
            assert apart(found, plain) > 0.05, "the adapter hardly shows"
            for i in range(4):
                assert same(ours.forward(batch_of([(first, [9 + i])])), theirs.append([(0, [9 + i])]))
            parts = [(0, [5]), (1, PROMPT[:9])]
            found = ours.forward(batch_of([({0: first, 1: second}[n], ids) for n, ids in parts]))
            assert same(found, theirs.append(parts))
            clone = ours.clone(first, 30)
            theirs.copy(0, 2, 30)
            parts = [(0, [7]), (2, PROMPT[:5])]
            found = ours.forward(batch_of([({0: first, 2: clone}[n], ids) for n, ids in parts]))
            assert same(found, theirs.append(parts))
            ours.rewind(first, 20)
            theirs.cut(0, 20)
            assert same(ours.forward(batch_of([(first, PROMPT[:6])])), theirs.append([(0, PROMPT[:6])]))
            silent = batch_of([(first, [11, 12])])
            ours.forward(replace(silent, wants_logits=np.zeros(2, np.bool_)))  # has no products of the last layer
            theirs.append([(0, [11, 12])], [False, False])
            assert same(ours.forward(batch_of([(first, [13])])), theirs.append([(0, [13])]))

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_are_libllamas_in_every_architecture_with_all_matrices_changed(
        self, tmp_path: Path, architecture: str
    ) -> None:
        path = model_file(next(row.name for row in ROWS.values() if row.architecture == architecture))
        with loaded(path) as model:
            names = "|".join(f"^{re.escape(name)}$" for name in changeable(model))
        file = write_adapter(tmp_path / "a.gguf", path, names=names)
        with beside(path) as (ours, theirs), adapter_of(ours, file) as adapter:
            theirs.adapt((file, 0.7))
            sequence = ours.open(scaled((adapter, 0.7)))
            for ids in (PROMPT, [9]):
                assert same(ours.forward(batch_of([(sequence, ids)])), theirs.append([(0, ids)]))

    @pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0])
    def test_are_libllamas_whatever_the_adapters_type(self, tmp_path: Path, kind: Type) -> None:
        path = write_llama(tmp_path / "m.gguf", types=Type.Q8_0)
        file = write_adapter(tmp_path / "a.gguf", path, rank=32, kind=kind)
        with beside(path) as (ours, theirs), adapter_of(ours, file) as adapter:
            theirs.adapt((file, 1.0))
            sequence = ours.open(scaled((adapter, 1.0)))
            assert same(ours.forward(batch_of([(sequence, PROMPT)])), theirs.append([(0, PROMPT)]))
            assert same(ours.forward(batch_of([(sequence, [9])])), theirs.append([(0, [9])]))

    @pytest.mark.parametrize(("alpha", "rank"), [(None, 4), (0.0, 3), (-2.5, 7), (16.0, 1), (1e-3, 64)])
    def test_are_libllamas_at_any_alpha_and_rank(self, tmp_path: Path, alpha: float | None, rank: int) -> None:
        path = write_llama(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path, alpha=alpha, rank=rank)
        with beside(path) as (ours, theirs), adapter_of(ours, file) as adapter:
            theirs.adapt((file, -1.3))
            sequence = ours.open(scaled((adapter, -1.3)))
            assert same(ours.forward(batch_of([(sequence, PROMPT)])), theirs.append([(0, PROMPT)]))

    def test_of_two_adapters_are_libllamas_in_one_of_the_two_orders(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        one = write_adapter(tmp_path / "1.gguf", path, seed=1, names=r"attn_")
        two = write_adapter(tmp_path / "2.gguf", path, seed=2, rank=8, names=r"attn_q|ffn_down")
        with beside(path) as (ours, theirs), adapter_of(ours, one) as a, adapter_of(ours, two) as b:
            theirs.adapt((one, 0.5), (two, 1.5))
            expected = theirs.append([(0, PROMPT)])
            orders = [[(a, 0.5), (b, 1.5)], [(b, 1.5), (a, 0.5)]]
            found = []
            for order in orders:  # each in the same cells: kernels round by where these lie
                sequence = ours.open(scaled(*order))
                found.append(ours.forward(batch_of([(sequence, PROMPT)])))
                ours.close(sequence)
            assert any(same(each, expected) for each in found)
            assert all(np.abs(each - expected).max() < 1e-3 for each in found)
            alone = ours.forward(batch_of([(ours.open(scaled((a, 0.5))), PROMPT)]))
            assert apart(alone, expected) > 0.05

    def test_of_many_adapters_of_every_matrix_fit_into_a_graph(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        files = [write_adapter(tmp_path / f"{seed}.gguf", path, seed=seed, gain=0.1) for seed in range(8)]
        with beside(path) as (ours, theirs):
            adapters = [load_adapter(ours.model, file) for file in files]
            theirs.adapt(*[(file, 1.0) for file in files])
            sequence = ours.open(scaled(*[(adapter, 1.0) for adapter in adapters]))
            found = ours.forward(batch_of([(sequence, PROMPT)]))
            assert np.abs(found - theirs.append([(0, PROMPT)])).max() < 1e-3
            ours.close(sequence)
            for adapter in adapters:
                ours.drop_adapter(adapter)

    def test_of_a_product_that_a_step_without_logits_leaves_out_are_libllamas_afterwards(self, tmp_path: Path) -> None:
        path = model_file("muse-glimmer")
        with loaded(path) as model:
            gate = f"blk.{model.hp.n_layer - 1}.attn_gate.weight"
        file = write_adapter(tmp_path / "a.gguf", path, names=re.escape(gate))
        with beside(path) as (ours, theirs), adapter_of(ours, file) as adapter:
            theirs.adapt((file, 1.0))
            silent = batch_of([(ours.open(scaled((adapter, 1.0))), PROMPT)])
            ours.forward(replace(silent, wants_logits=np.zeros(len(PROMPT), np.bool_)))
            theirs.append([(0, PROMPT)], [False] * len(PROMPT))
            sequence = int(silent.sequences[0])
            assert same(ours.forward(batch_of([(sequence, [13])])), theirs.append([(0, [13])]))

    def test_at_scale_0_are_those_of_the_model_and_so_is_the_fingerprint(self, tmp_path: Path) -> None:
        path = write_gemma3(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path)
        with running(path, **PLAIN) as executor, adapter_of(executor, file) as adapter:
            nothing = scaled((adapter, 0.0))
            assert same(feed(executor, executor.open(nothing), PROMPT), feed(executor, executor.open(), PROMPT))
            assert nothing == NO_ADAPTERS
            assert nothing.fingerprint_over(executor.fingerprint) == executor.fingerprint

    def test_of_a_changed_embedding_that_is_tied_change_what_is_looked_up_alone(self, tmp_path: Path) -> None:
        tied = write_llama(tmp_path / "tied.gguf", tied=True)
        forge = taken_apart(tied)
        embedding = next(tensor for tensor in forge.tensors if tensor.name == "token_embd.weight")
        forge.tensor("output.weight", shape=embedding.shape, kind=embedding.kind, data=embedding.data)
        untied = forge.write(tmp_path / "untied.gguf")
        file = write_adapter(tmp_path / "a.gguf", tied, names="token_embd")
        with running(tied, **PLAIN) as ours, adapter_of(ours, file) as adapter, beside(untied) as (_, theirs):
            theirs.adapt((file, 1.0))
            found = ours.forward(batch_of([(ours.open(scaled((adapter, 1.0))), PROMPT)]))
            assert np.abs(found - theirs.append([(0, PROMPT)])).max() < 1e-4


class TestSharing:
    def test_scales_share_a_graph_and_adapters_do_not(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        files = [write_adapter(tmp_path / f"{seed}.gguf", path, seed=seed) for seed in (1, 2)]
        with beside(path) as (ours, theirs), adapter_of(ours, files[0]) as a, adapter_of(ours, files[1]) as b:
            built = []
            for file, adapter, scale in [
                (files[0], a, 1.0),
                (files[0], a, 0.25),
                (files[1], b, 1.0),
                (files[0], a, -3.0),
            ]:
                theirs.restart()
                theirs.adapt((file, scale))
                sequence = ours.open(scaled((adapter, scale)))
                before = ours.graphs.n_built
                assert same(ours.forward(batch_of([(sequence, PROMPT)])), theirs.append([(0, PROMPT)])), scale
                ours.close(sequence)
                built.append(ours.graphs.n_built - before)
            assert built == [1, 0, 1, 0]

    def test_a_step_of_different_adapters_is_refused_and_changes_nothing(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path)
        with running(path, **PLAIN) as executor, adapter_of(executor, file) as adapter:
            sequences = [executor.open(scaled((adapter, 1.0))), executor.open(scaled((adapter, 0.5))), executor.open()]
            for pair in ((0, 1), (0, 2), (1, 2)):
                with pytest.raises(InputError, match="same adapters"):
                    executor.forward(batch_of([(sequences[i], PROMPT) for i in pair]))
            assert [executor.length(sequence) for sequence in sequences] == [0, 0, 0]
            assert executor.free_cells == executor.capacity
            for sequence in sequences:
                executor.forward(Batch.of_sequence(sequence, PROMPT))

    def test_a_clone_has_the_adapters_of_its_source(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path)
        with running(path, **PLAIN) as executor, adapter_of(executor, file) as adapter:
            source, cold, plain = (executor.open(scaled((adapter, scale))) for scale in (1.0, 1.0, 0.0))
            feed(executor, source, PROMPT)
            clone = executor.clone(source, 40)
            executor.close(source)
            grandchild = executor.clone(clone, 40)
            feed(executor, cold, PROMPT)
            feed(executor, plain, PROMPT)
            expected = feed(executor, cold, [9, 8, 7])
            assert np.abs(feed(executor, clone, [9, 8, 7]) - expected).max() < 1e-4
            assert np.abs(feed(executor, grandchild, [9, 8, 7]) - expected).max() < 1e-4
            assert apart(feed(executor, plain, [9, 8, 7]), expected) > 0.05

    def test_sequences_are_opened_with_the_executors_own_where_nothing_is_asked_for(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path)
        with loaded(path, threads=1) as model:
            adapter = load_adapter(model, file)
            executor = GgmlExecutor(model, adapters=scaled((adapter, 1.0)))
            try:
                own, asked, none = executor.open(), executor.open(executor.adapters), executor.open(NO_ADAPTERS)
                logits = [feed(executor, sequence, PROMPT) for sequence in (own, asked, none)]
                assert same(logits[0], logits[1])
                assert apart(logits[2], logits[0]) > 0.05
                for sequence in (own, asked, none):
                    executor.close(sequence)
                with pytest.raises(OptionError, match="new sequences"):
                    executor.drop_adapter(adapter)
            finally:
                executor.close_all()
                adapter.free()

    def test_adapters_of_another_model_are_refused(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path)
        with loaded(path) as other, running(path, **PLAIN) as executor:
            adapter = load_adapter(other, file)
            with pytest.raises(OptionError, match="another model"):
                executor.open(scaled((adapter, 1.0)))
            adapter.free()


class TestFreeing:
    def test_an_adapter_goes_when_no_sequence_has_it_and_takes_its_graphs_along(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path)
        with running(path, **PLAIN) as executor:
            adapter = load_adapter(executor.model, file)
            sequence, plain = executor.open(scaled((adapter, 1.0))), executor.open()
            for each in (sequence, plain):
                feed(executor, each, PROMPT)
            clone = executor.clone(sequence, 5)
            executor.close(sequence)
            with pytest.raises(OptionError, match="1 open sequences"):
                executor.drop_adapter(adapter)
            assert not adapter.is_closed
            feed(executor, clone, [5])
            executor.close(clone)
            assert len(executor.graphs) == 3
            executor.drop_adapter(adapter)
            executor.drop_adapter(adapter)
            assert len(executor.graphs) == 1
            assert adapter.is_closed
            with pytest.raises(OptionError, match="any more"):
                executor.open(scaled((adapter, 1.0)))
            feed(executor, plain, [5])

    def test_its_memory_is_given_back(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        file = write_adapter(tmp_path / "a.gguf", path)
        with loaded(path) as model:
            adapter = load_adapter(model, file)
            memory = adapter._file.parts[0].buffer
            assert adapter.pairs
            adapter.free()
            adapter.free()
            assert not adapter.pairs
            assert adapter._file.closed
            assert not adapter._weights
            assert not adapter._weights._buffers
            memory.release()


class TestFingerprints:
    def test_name_every_number_alpha_scale_and_order(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        forges = {
            "plain": adapter_forge(path),
            "seed": adapter_forge(path, seed=1),
            "alpha": adapter_forge(path, alpha=7.0),
            "one number": adapter_forge(path),
        }
        changed = forges["one number"].tensors[0]
        data = bytearray(changed.data)
        data[len(data) // 3] ^= 1  # no sample of a few bytes would find it
        changed.data = bytes(data)
        with loaded(path) as model:
            loaded_ones = [load_adapter(model, f.write(tmp_path / f"{name}.gguf")) for name, f in forges.items()]
            again = load_adapter(model, tmp_path / "plain.gguf")
            a, b = loaded_ones[:2]
            sets = [
                *[scaled((each, 1.0)) for each in loaded_ones],
                scaled((a, 0.5)),
                scaled((a, 1.0), (b, 1.0)),
                scaled((b, 1.0), (a, 1.0)),
                NO_ADAPTERS,
            ]
            assert len({each.fingerprint_over("base") for each in sets}) == len(sets)
            assert scaled((a, 1.0)).fingerprint_over("base") != scaled((a, 1.0)).fingerprint_over("other")
            assert scaled((again, 1.0)).fingerprint_over("base") == scaled((a, 1.0)).fingerprint_over("base")
            for each in (*loaded_ones, again):
                each.free()


@pytest.mark.parametrize("name", ["llama", "qwen2moe"])
def test_a_batch_of_sequences_of_one_adapter_equals_each_alone_in_deterministic_mode(tmp_path: Path, name: str) -> None:
    path = model_file(name)
    file = write_adapter(tmp_path / "a.gguf", path)
    with (
        loaded(path, threads=1) as model,
        executor_over(model, deterministic=True, run=64) as executor,
        adapter_of(executor, file) as adapter,
    ):
        alone, together = executor.open(scaled((adapter, 1.0))), executor.open(scaled((adapter, 1.0)))
        other = executor.open(scaled((adapter, 1.0)))
        expected = feed(executor, alone, PROMPT, 7)
        parts = [(together, PROMPT[:13]), (other, PROMPT[:3])]
        found = executor.forward(batch_of(parts))[:13]
        assert same(found, expected[:13])
        assert same(feed(executor, together, PROMPT[13:]), expected[13:])
