"""`Vocabulary`: text to token ids and back, on libllama's tokenizer.

What libllama is given is made by `vocab_tables`, never the model's own file. Ids are checked before they reach it, text
is valid UTF-8. Control tokens' text stays text unless the caller asks for it to be parsed, and control tokens have no
text when decoded. The beginning-of-sequence token is added here, not by libllama, so that there is exactly one.

A vocabulary does not change after `load`: all threads may use it at once. Its memory is freed with the last reference.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ggml_engine.errors import InputError, NativeError, VocabularyError
from ggml_engine.ggml.library import ffi, load
from ggml_engine.ggml.vocab_tables import CONTROL, UNKNOWN, USER_DEFINED, Tables, log, read_tables

if TYPE_CHECKING:
    from ggml_engine.ggml.gguf import GGUFFile

__all__ = ["Detokenizer", "StreamDecoder", "Vocabulary"]

MAX_TEXT_BYTES: Final = 32 * 2**20

# libllama's special-token search takes time quadratic in the matches of a text, so a long text goes in blocks.
_BLOCK_CHARS: Final = 32_768

# Pre-tokenizers that libllama splits with code of its own. The others go through std::regex, which takes stack for each
# character of a match: 100,000 equal letters overflow 8 MiB and kill the process.
_LINEAR_NAMES: Final = """
    a.x-4.0 chatglm-bpe codeshell command-r dbrx deepseek-r1-qwen exaone exaone4 f2llmv2 falcon-h1 falcon3 gemma4
    gigachat glm4 glm5 gpt-2 granite-docling granite-embed-multi-311m grok-2 hunyuan jais jina-de jina-es jina-v1-en
    jina-v2-code jina-v2-de jina-v2-es jina-v5-nano kormo lfm2 llama-bpe llama-v3 llama3 megrez mellum mellum2 midm-2.0
    minerva-7b modern-bert mpt olmo phi-2 pixtral qwen2 qwen35 refact roberta-bpe sarvam-moe smaug-bpe smollm solar-open
    stablelm2 starcoder trillion
"""
_LINEAR_PRE_TOKENIZERS: Final = frozenset(_LINEAR_NAMES.split())
_RUN_CHARS: Final = 500
_LONG_RUN: Final = re.compile(rf"\w{{{_RUN_CHARS}}}|[^\w\s]{{{_RUN_CHARS}}}|\s{{{_RUN_CHARS}}}|\S{{{2 * _RUN_CHARS}}}")
_LAST_BREAK: Final = re.compile(r".*[^\w\s](?=\w)", re.DOTALL)

_STRIPS_RIGHT: Final = 1 << 8  # LLAMA_TOKEN_ATTR_RSTRIP
_STRIPS: Final = _STRIPS_RIGHT | 1 << 7  # LLAMA_TOKEN_ATTR_LSTRIP
_C_SPACES: Final = " \t\n\v\f\r"


class Vocabulary:
    """The tokens of one model.

    `n_tokens` ids have text; `n_rows` >= `n_tokens` is the number of rows that logits have, padding included. `bos`,
    `eos`, `eot` are ids or None. `end_tokens` are all the ids that end a generation. `warnings` are for people.
    """

    def __init__(self, tables: Tables, model: Any) -> None:
        llama = load().llama
        self._llama = llama
        self._model = model
        self.native: Final = llama.llama_model_get_vocab(model)  # for samplers, which must keep this object alive
        self.n_tokens: Final = tables.n_tokens
        self.n_rows: Final = tables.n_rows
        self.tokenizer: Final = tables.tokenizer
        self.warnings: Final = tables.warnings
        self._types = tables.types
        self._pieces = tables.pieces
        self._met = dict(tables.pieces)  # pieces of tokens that were asked for, too
        self._texts = tables.texts
        self._n_added = tables.n_added
        self._is_linear = tables.tokenizer != "gpt2" or tables.pre in _LINEAR_PRE_TOKENIZERS
        self._special = tables.special
        self._dropped = tables.dropped
        self.bos: Final = self._find_special("bos", llama.llama_vocab_bos)
        self.eos: Final = self._find_special("eos", llama.llama_vocab_eos)
        self.eot: Final = self._special.get("eot")
        self.unknown: Final = self._special.get("unknown")
        self.adds_bos: Final = self.bos is not None and bool(llama.llama_vocab_get_add_bos(self.native))
        self.adds_eos: Final = self.eos is not None and bool(llama.llama_vocab_get_add_eos(self.native))
        self.adds_space: Final = tables.adds_space
        self.end_tokens: Final = frozenset(self._find_ends(tables.turn_ends))
        count = ffi.new("int32_t *")
        suppressed = llama.llama_vocab_get_suppress_tokens(self.native, count)
        self.suppressed: Final = tuple(sorted({int(suppressed[i]) for i in range(count[0])} - {-1}))

    @classmethod
    def load(cls, file: GGUFFile) -> Vocabulary:
        """The vocabulary of an open model file, which is not needed afterwards.

        About 0.35 s for 262,144 tokens, most of it inside libllama; `PendingVocabulary` lets that run beside other
        work. VocabularyError when the tables are unusable; repaired faults are `warnings`.
        """
        return PendingVocabulary(file).result()

    def __repr__(self) -> str:
        return f"Vocabulary({self.tokenizer}, {self.n_tokens} tokens, {self.n_rows} rows)"

    # ---- facts about tokens ----

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation; False for ids that are none."""
        return token in self.end_tokens

    def text(self, token: int) -> str:
        """The token's entry in the file, with U+FFFD for what is not UTF-8; `piece` is what it decodes to."""
        token = self.check_token(token)
        raw = self._texts.get(token)
        if raw is None:
            raw = ffi.string(self._llama.llama_vocab_get_text(self.native, token))
        return raw.decode("utf-8", "replace")

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text to id of the control and user-defined tokens: what `parse_special` recognises, in the order of ids."""
        kinds = np.isin(self._types, (CONTROL, USER_DEFINED))
        tokens = sorted({*np.flatnonzero(kinds).tolist(), *self.end_tokens} - self._pieces.keys())
        return {self.text(token): token for token in tokens}

    @property
    def literal_texts(self) -> tuple[str, ...]:
        """Texts that are tokens as they stand, before all else: control, user-defined and unknown ones."""
        return tuple(self._special_patterns[True][1])

    @cached_property
    def strips_spaces(self) -> bool:
        """Whether white space beside some token gets lost."""
        ids = self._special_patterns[True][1].values()
        return any(self._llama.llama_vocab_get_attr(self.native, token) & _STRIPS for token in ids)

    def check_tokens(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """`ids` as i32 [n]; InputError unless all are integers in 0 to n_tokens - 1 (a bool or a float is none)."""
        values: NDArray[Any]
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise InputError(f"token ids must be integers in one row, not {ids.dtype} of shape {ids.shape}")
            values = ids
        else:
            if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
                raise InputError(f"token ids must be a sequence of integers, not {type(ids).__name__}")
            for value in ids:
                if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                    raise InputError(f"a token id must be an integer, not {value!r}")
            if len(ids) and not 0 <= min(ids) <= max(ids) < self.n_tokens:
                values = np.array([value for value in ids if not 0 <= value < self.n_tokens][:1], object)
            else:
                values = np.asarray(ids, np.int32)
        if len(values) and not 0 <= values.min() <= values.max() < self.n_tokens:
            wrong = next(value for value in values.tolist() if not 0 <= value < self.n_tokens)
            raise InputError(f"token id {wrong} is out of range: the vocabulary has 0 to {self.n_tokens - 1}")
        return values.astype(np.int32)

    def check_token(self, token: int) -> int:
        """`check_tokens` of one."""
        if type(token) is int and 0 <= token < self.n_tokens:
            return token
        return int(self.check_tokens([token])[0])

    # ---- text to tokens ----

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        """The tokens of a text, i32 [n].

        `add_special` puts the file's beginning (and end) token around it, if the file asks for one and the text does
        not have it already. Without `parse_special`, text that spells a control token stays text. InputError for a
        text that is no UTF-8 (a lone surrogate), or over 32 MiB. Texts over 32,768 characters are tokenised in blocks,
        cut at line ends; so are, for some byte-pair tokenizers, runs of over 500 characters without a break.
        """
        return self.encode_segments([(text, parse_special)], add_special=add_special)

    def encode_segments(self, segments: Sequence[tuple[str, bool]], *, add_special: bool) -> NDArray[np.int32]:
        """The tokens of several texts in a row, each with its own `parse_special`; otherwise as `encode`.

        A tokenizer that puts a space before words does so where it would in the joined text: at the start, and after a
        special token, never between two texts.
        """
        parts: list[NDArray[np.int32]] = []
        is_start = True
        for text, parse_special in segments:
            _utf8(text)
            if not text:
                continue
            if self.adds_space:
                for fragment in self._split_special(text, parse_special):
                    if isinstance(fragment, int):
                        parts.append(np.array([fragment], np.int32))
                        is_start = True
                    elif fragment:
                        prefix = " " if is_start else ""
                        parts += [self._tokenize(block, False) for block in self._blocks(prefix + fragment)]
                        is_start = False
            else:
                parts += [self._tokenize(block, parse_special) for block in self._blocks(text)]
        ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        return self._with_ends(ids) if add_special else ids

    def _with_ends(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        if self.adds_bos:
            others = np.flatnonzero(ids != self.bos)
            n_leading = int(others[0]) if len(others) else len(ids)
            ids = np.concatenate([np.array([self.bos], np.int32), ids[n_leading:]])
        if self.adds_eos and not (len(ids) and ids[-1] == self.eos):
            ids = np.append(ids, np.int32(self.eos or 0)).astype(np.int32)
        return ids

    def _blocks(self, text: str) -> Iterator[str]:
        if self.tokenizer != "gpt2":
            while len(text) > _BLOCK_CHARS:
                cut = self._outside_special(text, _find_cut(text))
                yield text[:cut]
                text = text[cut:]
        elif not self._is_linear:
            while (run := _LONG_RUN.search(text)) is not None:
                at_break = _LAST_BREAK.match(text, run.start(), run.end())
                cut = at_break.end() if at_break else run.end()
                yield text[:cut]
                text = text[cut:]
        if text:
            yield text

    def _outside_special(self, text: str, cut: int) -> int:
        """`cut`, or where the special token begins that it would tear apart."""
        pattern, ids = self._special_patterns[True]
        reach = min(max(map(len, ids), default=0), _BLOCK_CHARS // 4)
        for match in pattern.finditer(text, cut - reach, cut + reach) if pattern else ():
            if match.start() < cut < match.end():
                return match.start()
        return cut

    def _tokenize(self, text: str, parse_special: bool) -> NDArray[np.int32]:
        data = text.encode()
        found = np.empty(len(data) + 8, np.int32)
        while True:
            n = self._llama.llama_tokenize(
                self.native, data, len(data), ffi.from_buffer("llama_token[]", found), len(found), False, parse_special
            )
            if n >= 0:
                break
            if n < -16 * (len(data) + 8):
                raise NativeError(f"llama_tokenize refused a text of {len(data)} bytes ({n})")
            found = np.empty(-n, np.int32)
        ids = found[:n]
        if self._n_added and n and ids.max() >= self.n_tokens:
            if self.unknown is None:
                raise InputError("the text holds characters that the vocabulary has no token for")
            ids[ids >= self.n_tokens] = self.unknown
        return ids

    def _split_special(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Cut a text at the special tokens that it spells, as libllama does, longest first."""
        pattern, ids = self._special_patterns[parse_special]
        position = 0
        for match in pattern.finditer(text) if pattern else ():
            token = ids[match[0]]
            yield text[position : match.start()]
            yield token
            position = match.end()
            if self._llama.llama_vocab_get_attr(self.native, token) & _STRIPS_RIGHT:
                position += len(text[position:]) - len(text[position:].lstrip(_C_SPACES))
        yield text[position:]

    @cached_property
    def _special_patterns(self) -> dict[bool, tuple[re.Pattern[str] | None, dict[str, int]]]:
        user_defined = {text: t for text, t in self.special_tokens.items() if not self._is_hidden(t)}
        unknown = {self.text(t): t for t in np.flatnonzero(self._types == UNKNOWN).tolist() if t not in self._pieces}
        patterns = {}
        for parse_special, ids in ((True, {**self.special_tokens, **unknown}), (False, user_defined)):
            longest_first = sorted(ids, key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None
            patterns[parse_special] = (pattern, ids)
        return patterns

    # ---- tokens to text ----

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text: perhaps half a character; none for control tokens."""
        return self._piece(self.check_token(token))

    def _piece(self, token: int) -> bytes:
        piece = self._met.get(token)
        if piece is None:
            piece = self._met[token] = self._asked_piece(token)
        return piece

    def _asked_piece(self, token: int) -> bytes:
        room = 32
        while True:
            buffer = ffi.new("char[]", room)
            n = self._llama.llama_token_to_piece(self.native, token, buffer, room, 0, False)
            if n >= 0:
                return bytes(ffi.buffer(buffer, n))
            room = -n

    def decode(self, tokens: Sequence[int] | NDArray[np.integer[Any]], *, continues: bool = False) -> str:
        """The text of tokens, U+FFFD standing for bytes that are no UTF-8.

        The space that some tokenizers put before a text is taken off, unless the tokens continue an earlier text.
        """
        data = b"".join(map(self._piece, self.check_tokens(tokens).tolist()))
        if self.adds_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    # ---- parts of loading ----

    def _is_hidden(self, token: int) -> bool:
        return bool(self._llama.llama_vocab_is_control(self.native, token))

    def _find_special(self, name: str, native: Any) -> int | None:
        """The file's id; without one libllama's guess, if it points at a control token; None for one out of range."""
        if name in self._special:
            return self._special[name]
        guess = int(native(self.native))
        is_usable = 0 <= guess < self.n_tokens and self._is_hidden(guess)
        return guess if is_usable and name not in self._dropped else None

    def _find_ends(self, turn_ends: Sequence[int]) -> Iterator[int]:
        fixed = {token for token in (self.eos, self.eot) if token is not None}
        fixed.update(self._special[name] for name in ("eom", "fim_pad", "fim_rep", "fim_sep") if name in self._special)
        for token in {*turn_ends, *fixed}:
            if self._llama.llama_vocab_is_eog(self.native, token) and (token in fixed or self._is_hidden(token)):
                yield token


class PendingVocabulary:
    """A vocabulary whose tables are checked already and which libllama parses in a thread, without Python's lock.

    The constructor raises VocabularyError when the tables are unusable. Ask for the `result`, or `wait`, before the
    process goes on without it.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._tables = read_tables(file)
        self._origin = file.path
        self._model: Any = None
        self._error: BaseException | None = None
        load()  # here: the thread would wait for Python's lock at every step of it, while this one imports
        self._thread = threading.Thread(target=self._parse, name="ggml-engine-vocabulary")
        self._thread.start()

    def _parse(self) -> None:
        try:
            self._model = _load_native(self._tables.gguf, self._origin)
        except BaseException as error:  # raised again where the result is asked for
            self._error = error

    def wait(self) -> None:
        """Until the thread has ended."""
        self._thread.join()

    def result(self) -> Vocabulary:
        """The vocabulary. Raises what the parsing raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return Vocabulary(self._tables, self._model)


class StreamDecoder:
    """Text from tokens as they come: `push` gives what is certain, `finish` the rest.

    A character is never split: its bytes wait for the token that completes it. All pieces joined are what
    `Vocabulary.decode` gives for all tokens, and the text of the control tokens that are `shown`. Not for use by two
    threads at once.
    """

    def __init__(self, vocabulary: Vocabulary, *, continues: bool = False, shown: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = vocabulary.adds_space and not continues

    def push(self, token: int) -> str:
        """The text that the token completes, perhaps empty. InputError for an id that is none."""
        data = self._vocabulary.piece(token)
        if not data and token in self._shown:
            data = self._vocabulary.text(token).encode()
        elif self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD for a character that stayed incomplete, else nothing. The decoder is then as new, mid-text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


Detokenizer = StreamDecoder


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"a text must be a str, not {type(text).__name__}")
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"character {error.start} of the text is a lone surrogate, which no UTF-8 has") from error
    if len(data) > MAX_TEXT_BYTES:
        raise InputError(f"the text has {len(data)} bytes, the limit is {MAX_TEXT_BYTES}")
    return data


def _find_cut(text: str) -> int:
    """Where to cut a long text: at the last change from line ends to text, else at a space, else at the limit."""
    for position in range(_BLOCK_CHARS, _BLOCK_CHARS // 2, -1):
        if text[position - 1] == "\n" and text[position] != "\n":
            return position
    space = text.rfind(" ", _BLOCK_CHARS // 2, _BLOCK_CHARS)
    return space if space > 0 else _BLOCK_CHARS


@contextlib.contextmanager
def _temporary_file(parts: Sequence[bytes | memoryview]) -> Iterator[str]:
    """A path under which `parts` can be read: memory where the system can, else a file that is removed."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("ggml-engine-vocabulary")
        path = f"/proc/self/fd/{descriptor}"
        with open(descriptor, "wb", buffering=0) as file:
            _write(file, parts)
            yield path
        return
    import tempfile  # noqa: PLC0415  # slow to import, and Linux does without

    descriptor, path = tempfile.mkstemp(prefix="ggml-engine-", suffix=".gguf")
    try:
        with open(descriptor, "wb", buffering=0) as file:
            _write(file, parts)
        yield path
    finally:
        os.unlink(path)


def _write(file: Any, parts: Sequence[bytes | memoryview]) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[file.write(view) :]


def _load_native(parts: Sequence[bytes | memoryview], origin: str) -> Any:
    llama = load().llama
    params = llama.llama_model_default_params()
    params.vocab_only = True
    begin = time.perf_counter()
    with _temporary_file(parts) as path:
        model = llama.llama_model_load_from_file(path.encode(), params)
    if model == ffi.NULL:
        raise VocabularyError(f"{origin}: libllama refuses the tokenizer's tables (the log has its reason)")
    log.debug("libllama took %.0f ms for the vocabulary of %s", 1e3 * (time.perf_counter() - begin), origin)
    return ffi.gc(model, llama.llama_model_free)
