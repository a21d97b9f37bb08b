"""libllama's own context as an executor: its logits are libllama's, and its memory stays in step with ours."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from embeddings import batch_with_prepared
from engines import batch_of, feed, libllama_running
from forged_models import drop_tensors, find_tensor, set_key, taken_apart
from libllama import Oracle, Type
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.errors import (
    AbortedError,
    AllocationError,
    CancelledError,
    ClosedError,
    ComputeError,
    HyperparameterError,
    InputError,
    ModelError,
    OptionError,
    PoolFullError,
    RewindError,
    SequenceLimitError,
    StepError,
    UnsupportedArchitectureError,
    VocabularyError,
    WeightError,
)
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.llama import LlamaExecutor
from ggml_engine.executor.llama_options import LlamaOptions
from ggml_engine.executor.prepared import EmbeddingInput
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.llama_model import LlamaModel
from ggml_engine.ggml.llama_rehearsal import rehearse

ROUNDED = 1e-1  # see test_executor_protocol
TOKENS: list[list[int]] = np.random.default_rng(3).integers(3, VOCAB, (4, 240)).tolist()
ATTENTION = ("llama tied, biases, frequency factors", "gemma3", "gpt-oss", "deepseek2", "qwen3moe")
ONE_STATE = ("mamba", "mamba2", "lfm2", "granitehybrid", "qwen35")


def oracle(path: Path, **options: Any) -> Oracle:
    geometry = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "type_k": Type.F16, "type_v": Type.F16}
    return Oracle(path, **{**geometry, "use_extra_bufts": True, **options})


def embeddings(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """What stands in an F32 file for these tokens."""
    with GGUFFile.open(path) as file:
        table = np.frombuffer(file.tensor_bytes("token_embd.weight"), np.float32).reshape(VOCAB, -1)
        return table[list(tokens)].copy()


def of_a_run(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """The logits of all tokens in an executor of their own."""
    with libllama_running(path, capacity=256, max_batch_tokens=64) as executor:
        return feed(executor, executor.open(), tokens, 64)


# ---- the same as libllama by itself


@pytest.mark.parametrize("name", [*ATTENTION, *ONE_STATE])
@pytest.mark.parametrize("form", ["matmul", "flash"])
def test_logits_are_libllamas_bytes(name: str, form: Any) -> None:
    path = model_file(name)
    with (
        libllama_running(path, capacity=256, max_batch_tokens=64, attention=form) as executor,
        oracle(path, flash=form == "flash", n_seq_max=33 if name in ATTENTION else 9) as expected,
    ):
        sequence = executor.open()
        at = 0
        for n in (40, 1, 1, 23, 1):
            tokens = TOKENS[0][at : at + n]
            found = executor.forward(Batch.of_sequence(sequence, tokens, logits="all"))
            assert found.tobytes() == expected.forward(tokens, at).tobytes()
            at += n
        assert np.ptp(found) > 1


def test_what_libllama_gives_to_others_is_kept(tmp_path: Path) -> None:  # R65
    """libllama gives cells that no window shows any more to others, although there are free ones; here it does not."""
    path = write_gemma3(tmp_path / "model.gguf", window=8)
    with libllama_running(path, capacity=256, max_batch_tokens=128) as executor:
        first, second = executor.open(), executor.open()
        feed(executor, first, TOKENS[0][:100], 100)
        feed(executor, second, TOKENS[1][:100], 100)
        executor.rewind(first, 50)
        feed(executor, first, TOKENS[0][50:106], 100)  # the free cells that come first, and those of the second
        clone = executor.clone(second, 9)
        assert clone is not None
        executor.rewind(second, 9)
        want = of_a_run(path, TOKENS[1][:9] + TOKENS[2][:9])[9:]
        assert np.abs(feed(executor, second, TOKENS[2][:9]) - want).max() < ROUNDED
        assert np.abs(feed(executor, clone, TOKENS[2][:9]) - want).max() < ROUNDED
        assert np.abs(feed(executor, first, TOKENS[0][106:110]) - of_a_run(path, TOKENS[0][:110])[106:]).max() < ROUNDED
        executor.close(first)
        executor.close(second)
        assert executor.free_cells == 256 - 18
        other = executor.open()
        for _ in range(238 // 14):  # every cell can be had again
            feed(executor, other, [5] * 14)
        assert executor.free_cells == 0


def test_windows_are_at_full_size(tmp_path: Path) -> None:  # R65
    path = write_gemma3(tmp_path / "model.gguf", window=8, context_length=2048)
    tokens = np.random.default_rng(1).integers(3, VOCAB, 900).tolist()
    with libllama_running(path, capacity=1024, max_batch_tokens=64) as executor:
        sequence = executor.open()
        feed(executor, sequence, tokens, 64)
        executor.rewind(sequence, 20)
        found = feed(executor, sequence, TOKENS[0][:9])
    assert np.abs(found - of_a_run(path, tokens[:20] + TOKENS[0][:9])[20:]).max() < ROUNDED


@pytest.mark.parametrize("name", ["gemma3", "mamba"])
def test_cells_and_states_are_given_back_and_taken_again_for_long(name: str) -> None:
    path = model_file(name)
    want = of_a_run(path, TOKENS[3][:12])
    with libllama_running(path, capacity=64, max_batch_tokens=64, max_sequences=3) as executor:
        rng = np.random.default_rng(0)
        open_: list[int] = []
        for _ in range(60):
            if len(open_) == 3:
                executor.close(open_.pop(int(rng.integers(3))))
            sequence = executor.open()
            open_.append(sequence)
            assert np.abs(feed(executor, sequence, TOKENS[3][:12], 5) - want).max() < ROUNDED
        for sequence in open_:
            executor.close(sequence)
        assert (executor.free_cells, executor.stats()["sequences_used"]) == (64, 0)


# ---- few sequences


@pytest.mark.parametrize("name", ["gemma3", "mamba"])
def test_sequences_that_have_tokens_are_bounded_and_empty_ones_are_not(name: str) -> None:
    with libllama_running(model_file(name), capacity=64, max_sequences=2) as executor:
        many = [executor.open() for _ in range(50)]
        feed(executor, many[0], TOKENS[0][:4])
        with pytest.raises(SequenceLimitError, match="2 more sequences, 1 of 2 can be had") as told:
            executor.forward(batch_of([(sequence, [5]) for sequence in many[:3]]))
        assert isinstance(told.value, PoolFullError)
        assert [executor.length(sequence) for sequence in many[:3]] == [4, 0, 0]
        assert executor.clone(many[0], 0) is not None
        clone = executor.clone(many[0], 4)
        assert clone is not None
        assert executor.clone(many[0], 4) is None
        executor.rewind(many[0], 0)  # without tokens it needs none
        feed(executor, many[1], TOKENS[1][:3])
        assert executor.free_cells == 64 - 7


# ---- what fails


def test_an_abort_stops_a_forward_natively_and_it_can_be_run_again(tmp_path: Path) -> None:  # R69 R108
    path = write_llama(tmp_path / "model.gguf", n_layer=24, n_embd=256, n_head=8, n_ff=1024, context_length=2048)
    with libllama_running(path, capacity=1024, max_batch_tokens=512) as executor:
        sequence = executor.open()
        tokens = np.random.default_rng(0).integers(3, VOCAB, 512).tolist()
        timer = threading.Timer(0.02, executor.abort)
        timer.start()
        with pytest.raises(AbortedError, match=r"512 tokens in libllama.*told to stop"):
            executor.forward(Batch.of_sequence(sequence, tokens))
        timer.join()
        assert (executor.length(sequence), executor.free_cells) == (0, 512)
        with pytest.raises(AbortedError):
            executor.forward(Batch.of_sequence(executor.open(), [5]))
        executor.clear_abort()
        with pytest.raises(StepError, match="not committed"):
            executor.forward(Batch.of_sequence(sequence, tokens))
        executor.rewind(sequence, 0)
        found = executor.forward(Batch.of_sequence(sequence, tokens))
    with Oracle(path, n_ctx=1024, n_batch=512, type_k=Type.F16, type_v=Type.F16, use_extra_bufts=True) as expected:
        assert np.abs(found[0] - expected.forward(tokens)[-1]).max() < ROUNDED


def test_a_recurrent_state_is_not_written_over_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort while its step runs lets that one end, since nobody could take it back, and stops the next one."""
    with libllama_running(model_file("lfm2"), capacity=64) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[0][:5])
        decode = executor._context.decode

        def aborted_meanwhile(*arguments: Any) -> bool:
            executor.abort()
            return decode(*arguments)

        monkeypatch.setattr(executor._context, "decode", aborted_meanwhile)
        feed(executor, sequence, TOKENS[0][5:9])
        monkeypatch.undo()
        with pytest.raises(AbortedError, match="before it began"):
            feed(executor, sequence, TOKENS[0][9:12])
        executor.clear_abort()
        executor.rewind(sequence, 9)  # nothing to take back
        found = feed(executor, sequence, TOKENS[0][9:12])
    assert np.abs(found - of_a_run(model_file("lfm2"), TOKENS[0][:12])[9:]).max() < ROUNDED


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_step_that_libllama_has_no_cells_for_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file(name)
    with libllama_running(path, capacity=64) as executor:
        first, second = executor.open(), executor.open()
        feed(executor, first, TOKENS[0][:5])
        step = batch_of([(first, TOKENS[0][5:8]), (second, TOKENS[1][:4])])
        for outcome, kind in [(lambda *_: False, PoolFullError), (_raising(InputError("no")), InputError)]:
            monkeypatch.setattr(executor._context, "decode", outcome)
            with pytest.raises(kind):
                executor.forward(step)
            monkeypatch.undo()
            assert (executor.length(first), executor.length(second), executor.free_cells) == (5, 0, 59)
            assert executor.stats()["sequences_used"] == 1
        found = executor.forward(step)
    assert np.abs(found[:3] - of_a_run(path, TOKENS[0][:8])[5:]).max() < ROUNDED


def _raising(error: Exception) -> Any:
    def decode(*_arguments: Any) -> bool:
        raise error

    return decode


@pytest.mark.parametrize(("name", "can_be_undone"), [("gemma3", True), ("lfm2", False)])
def test_a_step_that_failed_after_a_part_is_undone_or_its_sequence_is_lost(
    name: str, can_be_undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # R56 R69
    path = model_file(name)
    with libllama_running(path, capacity=64) as executor:
        sequence, other = executor.open(), executor.open()
        feed(executor, sequence, TOKENS[0][:5])
        feed(executor, other, TOKENS[1][:5])
        decode = executor._context.decode

        def fails_late(*arguments: Any) -> bool:
            decode(*arguments)
            raise ComputeError("it broke")

        monkeypatch.setattr(executor._context, "decode", fails_late)
        with pytest.raises(ComputeError):
            feed(executor, sequence, TOKENS[0][5:9])
        monkeypatch.undo()
        assert executor.free_cells == 64 - 14
        assert (executor.clone(sequence, 5) is not None) is can_be_undone
        if can_be_undone:
            executor.rewind(sequence, 5)
        else:
            with pytest.raises(RewindError, match="cannot be undone"):
                executor.rewind(sequence, 5)
            executor.rewind(sequence, 0)
            feed(executor, sequence, TOKENS[0][:5])
        found = feed(executor, sequence, TOKENS[0][5:9])
        assert np.abs(found - of_a_run(path, TOKENS[0][:9])[5:]).max() < ROUNDED
        assert np.abs(feed(executor, other, TOKENS[1][5:9]) - of_a_run(path, TOKENS[1][:9])[5:]).max() < ROUNDED


# ---- embeddings


@pytest.mark.parametrize("name", ["llama tied, biases, frequency factors", "mamba", "qwen35"])
def test_a_models_own_embeddings_stand_for_its_tokens_also_in_the_midst_of_a_step(name: str) -> None:  # R45
    path = model_file(name)
    with libllama_running(path, capacity=128) as executor:
        first, second = executor.open(), executor.open()
        source = EmbeddingInput(embeddings(path, TOKENS[0][4:14]), executor._model_fingerprint)
        step = batch_with_prepared([(first, TOKENS[0][:4]), (first, (source, 0, 7)), (second, TOKENS[1][:5])])
        found = [executor.forward(step), executor.forward(batch_with_prepared([(first, (source, 7, 10))]))]
        found.append(executor.forward(Batch.of_sequence(first, TOKENS[0][14:20], logits="all")))
        for wrong in (EmbeddingInput(np.ones((3, 5))), EmbeddingInput(np.ones((3, 64)), "of another model")):
            assert not executor.accepts(wrong)
            with pytest.raises(InputError, match="rows of 64 numbers"):
                executor.forward(batch_with_prepared([(first, (wrong, 0, 3))]))
    alone = of_a_run(path, TOKENS[0][:20])
    want = np.concatenate([alone[:11], of_a_run(path, TOKENS[1][:5]), alone[11:]])
    assert np.abs(np.concatenate(found) - want).max() < ROUNDED


# ---- what cannot be loaded, or not like this


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    for name, values in {"capacity": (0, 2**31), "max_batch_tokens": (0,), "max_sequences": (0, 256, True),
                         "threads": (0, 513), "attention": ("fast",), "k_type": ("f12",)}.items():  # fmt: skip
        for value in values:
            with pytest.raises(OptionError), libllama_running(path, **{name: value}):
                pass
    with pytest.raises(OptionError, match="q8_0"), libllama_running(path, v_type="q8_0", attention="matmul"):
        pass
    with pytest.raises(AllocationError, match="smaller context"), libllama_running(path, capacity=2**31 - 2048):
        pass


def test_a_step_may_be_smaller_than_the_number_of_sequences(tmp_path: Path) -> None:
    """libllama ends the process where its batch is shorter than that."""
    path = write_llama(tmp_path / "model.gguf")
    with libllama_running(path, capacity=16, max_batch_tokens=4, max_sequences=255) as executor:
        assert feed(executor, executor.open(), TOKENS[0][:16], 4).shape == (16, VOCAB)


def test_encoders_are_refused() -> None:
    with (
        pytest.raises(UnsupportedArchitectureError, match=r"'bert'.*only decoders"),
        libllama_running(model_file("bert")),
    ):
        pass


REFUSED: dict[str, tuple[Any, type[ModelError], str]] = {
    "no layers": (lambda f: set_key(f, "llama.block_count", 0), HyperparameterError, "block_count"),
    "too many layers": (lambda f: set_key(f, "llama.block_count", 513), HyperparameterError, "512"),
    "too many experts": (lambda f: set_key(f, "llama.expert_count", 2**31), HyperparameterError, "expert_count"),
    "experts and none used": (lambda f: set_key(f, "llama.expert_count", 4), HyperparameterError, "expert_used_count"),
    "used experts and none there": (
        lambda f: set_key(f, "llama.expert_used_count", 4), HyperparameterError, "must be 0 to 0, is 4",
    ),
    "a rotation of nothing": (lambda f: set_key(f, "llama.rope.dimension_count", 0), HyperparameterError, "2 to"),
    "a rotation of one and a half": (lambda f: set_key(f, "llama.rope.dimension_count", 3), HyperparameterError, "even"),
    "a window beyond all": (
        lambda f: set_key(f, "llama.attention.sliding_window", 2**31), HyperparameterError, "sliding_window",
    ),
    "a base that is no number": (
        lambda f: set_key(f, "llama.rope.freq_base", float("nan")), HyperparameterError, "finite",
    ),
    "a negative epsilon": (
        lambda f: set_key(f, "llama.attention.layer_norm_rms_epsilon", -1.0), HyperparameterError, "above 0",
    ),
    "tokens twice": (
        lambda f: set_key(f, "tokenizer.ggml.tokens", ["a"] * VOCAB), VocabularyError, "have the text of another",
    ),
    "integers for weights": (
        lambda f: setattr(find_tensor(f, "blk.0.attn_q.weight"), "kind", int(Type.I32)), WeightError, "I32",
    ),
    "an architecture of nobody": (
        lambda f: set_key(f, "general.architecture", "llama9"), HyperparameterError, "llama9.block_count",
    ),
    "a missing tensor": (lambda f: drop_tensors(f, "blk.1.attn_q"), ModelError, "blk.1.attn_q.weight' not found"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_files_that_libllama_would_not_survive_do_not_reach_it(fault: str, tmp_path: Path) -> None:
    change, kind, said = REFUSED[fault]
    forge = taken_apart(write_llama(tmp_path / "whole.gguf"))
    change(forge)
    path = tmp_path / "model.gguf"
    forge.write(path)
    with pytest.raises(kind, match=said), libllama_running(path):
        pass


def test_a_file_that_ends_a_process_in_libllama_ends_a_child(tmp_path: Path) -> None:
    forge = taken_apart(write_llama(tmp_path / "whole.gguf"))
    set_key(forge, "llama.rope.scaling.type", "strange")
    forge.write(tmp_path / "model.gguf")
    said = r"ends a process in libllama, tried in a child \(exit -6\).*GGML_ASSERT"
    with GGUFFile.open(tmp_path / "model.gguf") as file, pytest.raises(ModelError, match=said):
        LlamaModel.load(file, device="cpu")
    for name in ("mamba", "bert", "gpt-oss"):
        with GGUFFile.open(model_file(name)) as file:
            rehearse(file)


def test_an_architecture_that_nobody_knows_is_told(tmp_path: Path) -> None:
    forge = taken_apart(write_llama(tmp_path / "whole.gguf"))
    set_key(forge, "general.architecture", "llama9")
    set_key(forge, "llama9.block_count", 2)
    forge.write(tmp_path / "model.gguf")
    with (
        pytest.raises(UnsupportedArchitectureError, match=r"'llama9' model.*libllama .* does not know"),
        libllama_running(tmp_path / "model.gguf"),
    ):
        pass


def test_loading_tells_how_far_it_is_and_can_be_cancelled(tmp_path: Path) -> None:
    with GGUFFile.open(write_llama(tmp_path / "model.gguf")) as file:
        seen: list[tuple[int, int]] = []
        LlamaModel.load(file, device="cpu", progress=lambda done, total: seen.append((done, total))).free()
        assert seen[-1] == (file.n_bytes, file.n_bytes)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        with pytest.raises(CancelledError):
            LlamaModel.load(file, device="cpu", cancel=lambda: True)
        with pytest.raises(ZeroDivisionError):
            LlamaModel.load(file, device="cpu", progress=lambda done, _total: 1 // (done and 0))


def test_a_closed_executor_says_so(tmp_path: Path) -> None:
    with GGUFFile.open(write_llama(tmp_path / "model.gguf")) as file:
        model = LlamaModel.load(file, device="cpu")
        executor = LlamaExecutor(model, LlamaOptions(capacity=64, threads=1))
        sequence = executor.open()
        executor.close_all()
        executor.close_all()
        for call in (
            executor.open,
            lambda: executor.close(sequence),
            lambda: executor.forward(Batch.of_sequence(sequence, [5])),
        ):
            with pytest.raises(ClosedError):
                call()
        model.free()
        model.free()


@pytest.mark.parametrize(("name", "n_bytes"), [("gemma3", None), ("lfm2", 2 * 2 * 32 * 2), ("mamba", 0)])
def test_bytes_of_a_cell_are_those_of_the_layers_that_keep_one(name: str, n_bytes: int | None) -> None:
    with libllama_running(model_file(name), capacity=64) as executor:
        assert executor.bytes_per_cell == (n_bytes if n_bytes is not None else executor.bytes_per_cell)
        assert bool(executor.bytes_per_cell) is (name != "mamba")
        assert executor.stats()["kv_capacity_bytes"] == 64 * executor.bytes_per_cell
