"""`PrefixCache`: snapshots of what was computed, and where new prompts may begin.

Two locks: that of the list is never held while the engine's thread is waited for, so that callbacks may take it; the
other lets one insert at a time see to the bounds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ggml_engine.control.capture import PromptCapture
from ggml_engine.control.deadline import Deadline
from ggml_engine.control.entry_list import EntryList, count_bytes, is_snapshot_of
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.prefix_match import Lookup, Miss, MissReason, difference, ranked, token_array
from ggml_engine.control.retention import CacheEntry, LeastRecentlyUsed, RetentionPolicy
from ggml_engine.control.runner import Adapters, Runner
from ggml_engine.control.saved_file import SavedFile, open_saved
from ggml_engine.control.saved_format import SavedState
from ggml_engine.control.saved_names import Directory, path_of
from ggml_engine.control.saved_prefixes import load_entries, save_entries
from ggml_engine.control.saving import PREFIX_CACHE, check_made_for
from ggml_engine.control.session import Session, Tokens
from ggml_engine.errors import OptionError, WouldBlockError
from ggml_engine.models.adapter_set import AdapterSet

log = logging.getLogger("ggml_engine.control")

Search = Generator[EngineFuture[Session | None], Session | None, Lookup]


class PrefixCache:
    """Snapshots by their tokens; a look-up shares the longest beginning that one of them has in common with a prompt.

    The caller owns it: no runner knows of it, nothing is retained until asked, and `max_entries` 0 turns it off (no
    clones at all). Snapshots of several runners may be in one cache; they serve their own runner, as long as its
    executor's fingerprint is what it was, and prompts for the same adapters at the same scales. `max_bytes` bounds the
    K/V of the cells that the snapshots hold, those that live sessions hold as well included, each cell once. A snapshot
    counts as one of the runner's resident sessions (`max_sessions`), and keeps the runner going. When an executor runs
    out of cells it takes those that snapshots alone hold: such an entry is gone, whatever the policy says.

    `replace_extended` lets an entry take the place of older ones with equal metadata (None equals None) that it begins
    with: of one conversation the longest snapshot is kept, and every earlier point can still be had from it where the
    executor clones at any position. Otherwise a conversation of many turns takes an entry for each.

    Reuse saves computing; it is no measure of memory: snapshots share cells with each other and with the sessions that
    they were taken of (`n_bytes` counts a shared cell once). Logits after reused tokens differ from those of a cold run
    unless the geometry is the same (docs/determinism.md): after 600 to 2,048 tokens of text, on x86-64 with AVX2, by up
    to 1.0 on SmolLM2 135M and 1.8 on Gemma 3 270M, probabilities at temperature 0.8 by up to 0.17 and 0.07, over K/V of
    f16 or q8_0 (benchmarks/prefix_reuse.py measures it). That the greedy text is the same is promised in deterministic
    mode only. Prepared inputs are not tokens: a snapshot that holds one is refused.

    All methods may be called from any thread. Those that wait for the engine (`lookup`, `insert`, `n_bytes`, `save`,
    `load`, `PromptCapture.collect`) raise WouldBlockError in its callbacks, and TimeoutError after `timeout` seconds;
    what was evicted or cleared meanwhile hurts no session that was handed out. Raises OptionError for bounds that are
    none.
    """

    def __init__(
        self,
        max_entries: int,
        max_bytes: int | None = None,
        policy: RetentionPolicy | None = None,
        *,
        replace_extended: bool = False,
    ) -> None:
        for name, value in (("max_entries", max_entries), ("max_bytes", max_bytes)):
            if value is None and name == "max_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(f"{name} must be an integer of at least 0, is {value!r}")
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._policy: RetentionPolicy = policy or LeastRecentlyUsed()
        self._replaces_extended = replace_extended
        self._entries = EntryList()
        self._inserting = threading.Lock()
        self._count_lock = threading.Lock()
        self._counts = dict.fromkeys(("lookups", "hits", "tokens_reused", "inserted", "evicted"), 0)

    # ---- looking up

    def lookup(
        self,
        runner: Runner,
        tokens: Tokens,
        timeout: float | None = None,
        *,
        adapters: Adapters | None = None,
        scope: object = None,
    ) -> Lookup:
        """An independent session of `runner` that shares what a snapshot has in common with the prompt `tokens`.

        It is computed with `adapters`, as in `Runner.open_session`: snapshots of others serve it not at all, and
        neither do those of another `scope` (equal ones are the same).

        At least the last token is left to be forwarded: continue with `session.generate_async(tokens[n_reused:])`, or
        `generate_from(tokens)`. Snapshots are tried in the order of what they have in common, then the one that was
        used last first, each once; one that cannot be cloned is passed over. Raises InputError for what are no tokens,
        OptionError for what are no adapters.
        """
        self._refuse_in_callback(runner)
        search = self._search(runner, tokens, adapters, scope)
        try:
            found = self._lookup(search, timeout)
        except MemoryError:
            log.exception("a look-up found no memory")
            found = Lookup(miss=Miss(MissReason.REFUSED))
        return self._counted(found)

    @staticmethod
    def _lookup(search: Search, timeout: float | None) -> Lookup:
        try:
            future = next(search)
            while True:
                try:
                    session = future.result(timeout)
                except TimeoutError:
                    future.cancel()
                    raise
                future = search.send(session)
        except StopIteration as end:
            found: Lookup = end.value
            return found

    def lookup_async(
        self, runner: Runner, tokens: Tokens, *, adapters: Adapters | None = None, scope: object = None
    ) -> EngineFuture[Lookup]:
        """A future of what `lookup` gives; waits for nothing, and may be called in a callback.

        What was found is closed where the future was cancelled before. Raises as `lookup`.
        """
        future: EngineFuture[Lookup] = EngineFuture(runner._core.is_engine_thread)
        self._go_on(self._search(runner, tokens, adapters, scope), future, None)
        return future

    def _go_on(self, search: Search, future: EngineFuture[Lookup], session: Session | None) -> None:
        """Try snapshots until one has to be waited for, whose end goes on from here."""
        try:
            while True:
                asked = search.send(session)
                if not asked.done():
                    asked.add_done_callback(lambda done: self._go_on(search, future, done.result()))
                    return
                session = asked.result()
        except StopIteration as end:
            found = self._counted(end.value)
        except MemoryError:
            log.exception("a look-up found no memory")
            found = self._counted(Lookup(miss=Miss(MissReason.REFUSED)))
        if not future.settle(found) and found.session is not None:
            found.session.close()

    def _search(self, runner: Runner, tokens: Tokens, adapters: Adapters | None, scope: object) -> Search:
        """Check what was asked for, and begin: a generator of clones that are asked for, and takes what they gave."""
        wanted = token_array(tokens)
        adapted = runner.executor.adapters if adapters is None else AdapterSet.of(adapters)
        return self._searching(runner, wanted, adapted, scope)

    def _searching(self, runner: Runner, tokens: npt.NDArray[np.int32], adapters: AdapterSet, scope: object) -> Search:
        if not self.max_entries:
            return Lookup(miss=Miss(MissReason.DISABLED))
        if tokens.size < 2:
            return Lookup(miss=Miss(MissReason.SHORT))
        self._fault("lookup")
        entries = [entry for entry in self._entries.alive() if entry.scope == scope]
        fingerprint = adapters.fingerprint_over(runner.executor.fingerprint)
        own = [entry for entry in entries if self._is_own(entry, runner, fingerprint)]
        if not own:
            return Lookup(miss=Miss(MissReason.FOREIGN if entries else MissReason.EMPTY))
        candidates = ranked(own, tokens)
        miss = difference(*candidates[0], tokens, runner.text)
        for entry, n in candidates:
            if not n:
                break
            self._fault("clone")
            session = yield entry.snapshot.clone_async(n)
            if session is not None and self._is_exact(session, tokens[:n]):
                self._entries.touch(entry)
                return Lookup(session, n, miss)
        if not candidates[0][1]:
            return Lookup(miss=miss)
        return Lookup(miss=Miss(MissReason.REFUSED, candidates[0][1]))

    def _counted(self, found: Lookup) -> Lookup:
        self._count(lookups=1, hits=int(found.session is not None), tokens_reused=found.n_reused)
        return found

    @staticmethod
    def _is_own(entry: CacheEntry, runner: Runner, fingerprint: str) -> bool:
        """Whether an entry's K/V is in this runner's executor, and is what the fingerprint stands for."""
        return entry.snapshot.runner is runner and entry.fingerprint == fingerprint

    def _is_exact(self, session: Session, tokens: npt.NDArray[np.int32]) -> bool:
        """Whether a clone has these tokens; one that has others is closed."""
        try:
            self._fault("found")
            # whoever took the snapshot may have a handle of it, and have gone on with it
            if np.array_equal(np.asarray(session.tokens, np.int32), tokens):
                return True
        except BaseException:
            session.close()
            raise
        session.close()
        return False

    def count_reusable(self, runner: Runner, tokens: Tokens, *, scope: object = None) -> int:
        """How many of the prompt's tokens a look-up would find now, without adapters of its own. Waits for nothing."""
        wanted = token_array(tokens)
        fingerprint = runner.executor.adapters.fingerprint_over(runner.executor.fingerprint)
        alive = [each for each in self._entries.alive() if each.scope == scope]
        own = [each for each in alive if self._is_own(each, runner, fingerprint)]
        return ranked(own, wanted)[0][1] if own else 0

    # ---- taking in

    def capture_prompt(self, session: Session, tokens: Tokens) -> PromptCapture:
        """What takes snapshots while `session` generates after the whole history `tokens`.

        A prompt of which there is a snapshot already is not captured again at its end. Waits for nothing. Raises
        InputError for what are no tokens.
        """
        wanted = token_array(tokens)
        if not self.max_entries:
            return PromptCapture(None, session, wanted)
        return PromptCapture(self, session, wanted, self._find(CacheEntry(session, wanted, None, session.fingerprint)))

    def holds(self, session: Session, tokens: Tokens, *, scope: object = None) -> bool:
        """Whether there is a snapshot of exactly `tokens` that stands for this session's; it counts as used now.

        Waits for nothing, and may be called in a callback.
        """
        return self._find(CacheEntry(session, token_array(tokens), None, session.fingerprint, scope)) is not None

    def _find(self, key: CacheEntry) -> CacheEntry | None:
        """The entry of the same tokens, which counts as used now."""
        saved = next((entry for entry in self._entries.alive() if key.is_duplicate(entry)), None)
        if saved is not None:
            self._entries.touch(saved)
        return saved

    def insert(
        self,
        snapshot: Session,
        tokens: Tokens,
        metadata: object = None,
        timeout: float | None = None,
        *,
        scope: object = None,
    ) -> bool:
        """Keep a session as the snapshot of exactly `tokens`; whether there is one of these in the cache then.

        The session is the cache's from here on: where it is not kept, it is closed. Not kept are those whose tokens are
        others, that are busy or closed, hold a prepared input, or find no room; one whose tokens are there already
        refreshes that entry, which takes over the new metadata. It serves look-ups of an equal `scope` alone, stands in
        for no snapshot of another one, and in no file; bounds and policy count them all.
        """
        self._refuse_in_callback(snapshot.runner)
        try:
            with self._turn_to_insert(timeout):
                return self._insert(snapshot, token_array(tokens), metadata, scope, timeout)
        except MemoryError:
            log.exception("a snapshot was not kept: there is no memory")
            return False
        finally:
            if not self._entries.holds(snapshot):
                snapshot.close()

    def _insert(
        self,
        snapshot: Session,
        tokens: npt.NDArray[np.int32],
        metadata: object,
        scope: object,
        timeout: float | None,
    ) -> bool:
        if not self.max_entries or not is_snapshot_of(snapshot, tokens):
            return False
        self._fault("insert")
        entry = CacheEntry(snapshot, tokens, metadata, snapshot.fingerprint, scope)
        if self._entries.refresh(entry, metadata):
            return True
        replaced: list[CacheEntry] = []
        if self._replaces_extended:
            alive = self._entries.alive()
            replaced = [old for old in alive if entry.extends(old) and old.metadata == metadata]
        if not self._make_room(entry, replaced, timeout):
            return False
        self._fault("retain")
        self._entries.append(entry, replaced)
        self._count(inserted=1)
        return True

    def _make_room(self, newcomer: CacheEntry, replaced: Sequence[CacheEntry], timeout: float | None) -> bool:
        """Evict until the bounds are kept with the newcomer, and without those that it replaces; whether they are."""
        if not self._fits([newcomer], timeout):
            return False
        while True:
            kept = [entry for entry in self._entries.alive() if entry not in replaced]
            has_place = len(kept) < self.max_entries
            if has_place and self._fits([*kept, newcomer], timeout) and not self._policy.is_over():
                return True
            if not kept or not self._evict(kept, newcomer):
                return False

    def _fits(self, entries: Sequence[CacheEntry], timeout: float | None) -> bool:
        if self.max_bytes is None:
            return True
        if not all(entry.snapshot.runner.executor.bytes_per_cell for entry in entries):
            log.warning("a snapshot was not kept: its executor does not say how many bytes its cells take")
            return False
        return count_bytes(entries, timeout) <= self.max_bytes

    # ---- letting go

    def trim(self) -> int:
        """Evict as long as the policy says that it is over; how many went. Waits for nothing."""
        n = 0
        while self._policy.is_over() and self._evict(self._entries.alive(), None):
            n += 1
        return n

    def clear(self) -> None:
        """Let all snapshots go. Waits for nothing."""
        for entry in self._entries.alive():
            self._entries.remove(entry)

    def _evict(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> bool:
        try:
            has_gone = self._entries.choose(lambda left: self._policy.victim(left, newcomer), entries)
        except Exception:
            log.exception("a policy of retention failed")
            return False
        self._count(evicted=int(has_gone))
        return has_gone

    def refresh(self, entry: CacheEntry) -> bool:
        """Make an entry the most recently used one; whether it can still serve."""
        return entry.snapshot.status == "open" and self._entries.touch(entry)

    # ---- outliving the process

    def save(
        self,
        directory: Directory,
        name: str = "prefix-cache",
        timeout: float | None = None,
        *,
        runner: Runner | None = None,
    ) -> int:
        """Save all entries as `name` in `directory`, one of that name is replaced; how many there are in it.

        Tokens, K/V (a shared cell once), the order of use, and metadata, which must be what JSON can keep (None, too).
        A file holds entries of one runner: `runner` says which, where there are several, and only its entries are
        saved; those that were computed with adapters, or have a scope, are left out. Forwards run in between. Raises
        SavedStateError, SessionError when cells ran out meanwhile, and OptionError where no runner can be told; then no
        file has changed.
        """
        self._refuse_in_callback(*([] if runner is None else [runner]))
        path, deadline = path_of(directory, name), Deadline(timeout)
        entries = [each for each in self._entries.alive() if each.scope is None]
        runners = {entry.snapshot.runner for entry in entries}
        if runner is None and len(runners) != 1:
            raise OptionError(f"a file holds entries of one runner, these are of {len(runners)}: name the runner")
        of_one = runners.pop() if runner is None else runner
        own = [each for each in entries if self._is_own(each, of_one, of_one.executor.fingerprint)]
        return save_entries(of_one, own, path, deadline)

    def load(
        self, runner: Runner, directory: Directory, name: str = "prefix-cache", timeout: float | None = None
    ) -> int:
        """Take in what `save` has written, as snapshots of `runner`; how many entries were loaded.

        Entries that are there stay, and count as used later than those that are loaded; of the same tokens there is one
        already. The bounds of this cache hold, neither cells nor places are taken from others, and a place for a
        session is left: where fewer fit, those are loaded that were used last. Raises SavedStateError, TimeoutError,
        ClosedError, and what the executor refuses with; then nothing was loaded.
        """
        self._refuse_in_callback(runner)
        path, deadline = path_of(directory, name), Deadline(timeout)
        with open_saved(path, deadline) as saved:
            check_made_for(runner._core, saved, PREFIX_CACHE)
            with self._turn_to_insert(deadline.left()):
                return self._load(runner, saved, deadline)

    def _load(self, runner: Runner, saved: SavedFile, deadline: Deadline) -> int:
        there = self._entries.alive()
        wanted = self._wanted(runner, saved.state, there)[: max(0, self.max_entries - len(there))]
        if not wanted or self._policy.is_over():
            return 0
        n_bytes = None if self.max_bytes is None else self.max_bytes - count_bytes(there, deadline.left())
        if n_bytes is not None and (n_bytes < 0 or not runner.executor.bytes_per_cell):
            return 0
        loaded = load_entries(runner, saved, wanted, n_bytes, deadline)
        self._entries.put_before(loaded)
        self._count(inserted=len(loaded))
        return len(loaded)

    @staticmethod
    def _wanted(runner: Runner, state: SavedState, there: Sequence[CacheEntry]) -> list[int]:
        """The sequences of a saved cache that are not there already, the one that was used last first."""
        fingerprint = runner.executor.fingerprint
        own = [each for each in there if each.scope is None and PrefixCache._is_own(each, runner, fingerprint)]
        known = {each.tokens.tobytes() for each in own}
        last = {each.tokens.tobytes(): i for i, each in enumerate(state.sequences)}
        return sorted((i for key, i in last.items() if key not in known), reverse=True)

    # ---- what is there

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def entries(self) -> tuple[CacheEntry, ...]:
        """Those that can serve, the least recently used one first."""
        return self._entries.alive()

    def n_bytes(self, timeout: float | None = None) -> int:
        """Bytes of K/V in the cells that the snapshots hold, each cell once."""
        self._refuse_in_callback()
        return count_bytes(self._entries.alive(), timeout)

    def stats(self) -> dict[str, int]:
        """Counts since the start: look-ups, hits, tokens reused, inserted and evicted; entries now."""
        n = len(self)
        with self._count_lock:
            return {**self._counts, "entries": n}

    # ---- inner things

    @contextmanager
    def _turn_to_insert(self, timeout: float | None) -> Iterator[None]:
        """Be the one who sees to the bounds. Raises TimeoutError: a load may take long."""
        if not self._inserting.acquire(timeout=-1 if timeout is None else min(max(0, timeout), threading.TIMEOUT_MAX)):
            raise TimeoutError(f"others were inserting or loading for {timeout} s")
        try:
            yield
        finally:
            self._inserting.release()

    def _count(self, **more: int) -> None:
        with self._count_lock:
            for name, n in more.items():
                self._counts[name] += n

    def _refuse_in_callback(self, *runners: Runner) -> None:
        if any(runner.is_in_callback for runner in {*runners, *self._entries.runners()}):
            raise WouldBlockError("this waits for the thread that the callback runs on: do it after the generation")

    def _fault(self, point: str) -> None:
        """Where memory may be missing: lookup, clone, found, insert, retain, capture, collect. Tests override it."""
