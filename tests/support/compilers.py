"""Whether a C compiler is there: the one that Python's own extensions are built with."""

from __future__ import annotations

import os
import shutil
import sysconfig


def has_compiler() -> bool:
    """As setuptools looks for it."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return shutil.which(command.split()[0]) is not None
