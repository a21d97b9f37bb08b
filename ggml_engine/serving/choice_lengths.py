"""How long the choices of one prompt may become, so that all of them fit the cells that there are."""

from __future__ import annotations

from ggml_engine.errors import OptionError
from ggml_engine.executor.protocol import Executor


def most_tokens(executor: Executor, n_prompt: int, n: int, limit: int) -> int:
    """How many tokens each of `n` choices may have where a session holds `limit`: all of them have room for theirs.

    Of an executor that cannot clone at any position nobody knows what they will share: there it is `limit` alone.
    Raises OptionError where there is no room for a token of each.
    """
    most = limit - n_prompt + 1  # the last token that is sampled takes no cell
    if n == 1 or not executor.clones_anywhere:
        return most
    each = most_tokens_each(n_prompt, n, executor.capacity, executor.run)
    if not each:
        raise OptionError(
            f"n is {n}: the {executor.capacity} cells of the context have no room for a prompt of {n_prompt} tokens "
            f"and one token of each choice"
        )
    return min(most, each)


def most_tokens_each(n_prompt: int, n: int, capacity: int, run: int) -> int:
    """How many tokens each of `n` choices after a prompt can have at once in `capacity` cells; 0 where none fits.

    They share the cells of the prompt but for its last token, of which each has its own; the token that is sampled last
    takes none. A position's cell is congruent to it modulo `run`, so that of each residue there are `capacity // run`.
    """
    n_runs, (n_shared_runs, first) = capacity // run, divmod(n_prompt - 1, run)
    # of the residues from that of the prompt's last token on, and of those before it, which the prompt uses once more
    later, earlier = (n_runs - n_shared_runs) // n, (n_runs - n_shared_runs - 1) // n
    if later == earlier or not first:
        return max(0, later * run)
    return max(0, earlier * run + run - first)
