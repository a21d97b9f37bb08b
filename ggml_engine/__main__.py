"""`python -m ggml_engine` is the command `ggml-engine`."""

import sys

from ggml_engine.cli.main import main

sys.exit(main())
