"""The compiled operations by themselves, where sanitizers see every access: their own C tests, built beside them.

`cell_attention_test.c`, `joint_products_test.c` and `panel_products_test.c` say what is compared; here each is compiled
as the package is, and run.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
_NATIVE = _TESTS.parent.parent / "ggml_engine" / "native"
_WARNINGS = ("-Wall", "-Wextra", "-Werror")


def _compiler() -> str:
    found = shutil.which("gcc") or shutil.which("clang")
    assert found is not None, "these tests need gcc or clang, as the kernel itself does"
    return found


def _run(program: Path, sources: tuple[Path, ...], flags: tuple[str, ...], n_settings: int) -> str:
    command = (
        _compiler(),
        *_WARNINGS,
        *flags,
        f"-I{_NATIVE}",
        *map(str, sources),
        "-o",
        str(program),
        "-lm",
        "-pthread",
    )
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = subprocess.run([program, str(n_settings)], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_kernel_equals_a_plain_sum_and_reads_nothing_that_is_not_there(tmp_path: Path, sanitizers: str) -> None:
    kernel = "neon" if platform.machine() in {"aarch64", "arm64"} else "avx2"
    sources = (_TESTS / "cell_attention_test.c", _NATIVE / f"cell_attention_{kernel}.c")
    flags = ("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    assert _run(tmp_path / "test", sources, flags, 60) == "60 settings are right\n"


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_joint_products_equal_plain_sums_and_need_no_more_than_their_scratch(tmp_path: Path, sanitizers: str) -> None:
    sources = (_TESTS / "joint_products_test.c", _NATIVE / "joint_products.c")
    flags = ("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    assert _run(tmp_path / "test", sources, flags, 200) == "200 settings are right\n"


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="there are panels for x86-64 alone")
@pytest.mark.parametrize("optimisation", ["-O1", "-O3"])
def test_panels_equal_ggmls_order_of_sums_to_the_bit(tmp_path: Path, optimisation: str) -> None:
    sources = (_TESTS / "panel_products_test.c", *sorted(_NATIVE.glob("panel_products*.c")))
    flags = (optimisation, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ffp-contract=off")
    assert _run(tmp_path / "test", sources, flags, 300) == "300 settings are right\n"


def test_a_compiler_that_is_not_gcc_is_left_with_no_kernel(tmp_path: Path) -> None:
    """Microsoft's: it sees none of GCC's words. `-U__GNUC__` is as near to it as one comes without it."""
    parts = {"cell_attention": ("avx2", "neon"), "panel_products": ("avx2", "avxvnni", "avx512bw", "avx512")}
    for part, vectors in parts.items():
        for name in vectors:
            source = _NATIVE / f"{part}_{name}.c"
            command = (_compiler(), "-E", "-P", "-U__GNUC__", f"-I{_NATIVE}", str(source))
            seen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert f"typedef int {part}_{name}_is_not_for_this_compiler;" in seen
            assert "static void attend(" not in seen
            assert "static void multiply_panel(" not in seen
