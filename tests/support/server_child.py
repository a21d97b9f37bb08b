"""A server with a fake loader in a process of its own, for signals and limits: `server_child.py [NOFILE]`.

Prints its address when it listens. Streams at `/stream` do not end by themselves.
"""

from __future__ import annotations

import sys

from server_fakes import FakeLoader, Jobs, options_of

from ggml_engine.server import dialects
from ggml_engine.server.run import Server


def tell(url: str) -> None:
    """For the one who started it."""
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
    dialects.routes = Jobs().routes
    server = Server(options_of(), loader=FakeLoader(), on_listening=tell)
    server.serve_until_told()
    sys.exit(0 if server.is_whole else 3)
