"""`python -m ggml_engine.cli`, where no script was installed."""

from __future__ import annotations

import sys

from ggml_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
