"""`TokenBytes`: how many bytes of a text one token can stand for, so that a text can be too long by its bytes alone.

Read off the tables of a vocabulary. Tokenising may drop bytes: letters that have no token, spaces beside some special
tokens. These are known beforehand and do not count; where more may be dropped, nothing is said of a vocabulary. Knows
how libllama falls back for what is no token (llama-vocab.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ggml_engine.ggml.gguf import GGUFFile, GGUFType
from ggml_engine.ggml.vocab_tables import BYTE_OF

if TYPE_CHECKING:
    from ggml_engine.ggml.vocab import Vocabulary

_NO_LETTER: Final = re.compile(f"[^{re.escape(''.join(BYTE_OF))}]")
_WITHOUT_LETTERS: Final = frozenset(("gemma4", "granite-embed-multi-311m", "sarvam-moe"))  # of "gpt2": as texts are
_DROPPING_WORDS_APART: Final = "whitespace"
_ESCAPED_SPACE: Final = "▁".encode()
_SPACES: Final = b" \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`longest` bytes of UTF-8 are the most that a token can stand for.

    Bytes that are in `lost` may be in no token. `openings` are spellings of a token that becomes one however often a
    text begins with it.
    """

    longest: int
    lost: bytes = b""
    openings: tuple[str, ...] = ()

    def count(self, text: str) -> int:
        """Bytes of a text that are certainly in tokens: with more than `n * longest` it has more than `n` tokens."""
        if self.openings and (opening := re.match(f"(?:{'|'.join(map(re.escape, self.openings))})+", text)):
            text = text[opening.end() :]
        data = text.encode("utf-8", "surrogatepass")
        return len(data.translate(None, self.lost)) if self.lost else len(data)


def token_bytes(file: GGUFFile, vocabulary: Vocabulary) -> TokenBytes | None:
    """What holds for the vocabulary of a file; None where too little is known. Takes up to some tenths of a second."""
    texts = file.metadata.array("tokenizer.ggml.tokens", GGUFType.STRING).strings()
    pre = file.metadata.find_text("tokenizer.ggml.pre") or ""
    spaces = _SPACES if vocabulary.strips_spaces else b""
    openings = _openings(vocabulary)
    if vocabulary.tokenizer == "llama":  # a byte without a token becomes the unknown one, or is refused
        return TokenBytes(max(map(len, texts)), spaces, openings)
    if vocabulary.tokenizer == "gemma4" or pre in _WITHOUT_LETTERS:
        lost = _missing({b"<0x%02X>" % byte: byte for byte in range(256)}, texts)
        if set(lost) & set(_ESCAPED_SPACE):
            spaces = _SPACES
        return TokenBytes(max(map(len, texts)), lost + spaces, openings)
    if pre == _DROPPING_WORDS_APART or not _merges_are_tokens(file, texts):
        return None
    lost = _missing({letter.encode(): byte[0] for letter, byte in BYTE_OF.items()}, texts)
    return TokenBytes(_longest_in_letters(texts, vocabulary), lost + spaces, openings)


def _openings(vocabulary: Vocabulary) -> tuple[str, ...]:
    """Whatever text the beginning-of-sequence token may come from, where one is put before a text."""
    if vocabulary.bos is None or not vocabulary.adds_bos:
        return ()
    as_it_stands = vocabulary.text(vocabulary.bos)
    spaced = as_it_stands.replace("▁", " ")
    spelled = b"".join(BYTE_OF.get(letter, letter.encode()) for letter in as_it_stands).decode("utf-8", "replace")
    return tuple(sorted({as_it_stands, spaced, spaced.lstrip(" "), spelled} - {""}))


def _missing(names: dict[bytes, int], texts: list[bytes]) -> bytes:
    """The bytes whose token is not there."""
    return bytes(sorted(names[name] for name in names.keys() - set(texts)))


def _merges_are_tokens(file: GGUFFile, texts: list[bytes]) -> bool:
    """Whether all that merges come to are tokens: of what is none, libllama drops the letters that are no ASCII."""
    merges = file.metadata.find_array("tokenizer.ggml.merges", GGUFType.STRING)
    known = set(texts)
    for merge in () if merges is None else merges.strings():
        middle = merge.find(b" ", 1)
        if middle > 0 and merge[:middle] + merge[middle + 1 :] not in known:
            return False
    return True


def _longest_in_letters(texts: list[bytes], vocabulary: Vocabulary) -> int:
    """Where a token's text is a letter for each byte, unless it stands for itself."""
    longest = max((len(text.encode()) for text in vocabulary.literal_texts), default=1)
    for text in sorted(texts, key=len, reverse=True):
        if len(text) <= longest:
            break
        letters = text.decode("utf-8", "replace")
        longest = max(longest, len(text) if _NO_LETTER.search(letters) else len(letters))
    return longest
