"""What tests of executors share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import form_by_default


@pytest.fixture(params=["matmul", "cells"])
def every_default(request: pytest.FixtureRequest) -> Iterator[str]:
    """The form that "auto" is on a CPU without a compiled kernel, and the one with it."""
    with form_by_default(request.param):
        yield request.param


@pytest.fixture
def in_matmul_form() -> Iterator[None]:
    """For what only the form over masks and blocks of rows does."""
    with form_by_default("matmul"):
        yield
