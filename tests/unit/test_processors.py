"""The number of cores to compute on is read from what the system says, whatever of it is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ggml_engine.errors import OptionError
from ggml_engine.ggml import threads
from ggml_engine.ggml.processors import count_cores
from ggml_engine.ggml.threads import ThreadCounts, default_threads


class Machine:
    """A tree of files as Linux has it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def core(self, *cpus: int, name: str = "core_cpus_list") -> None:
        for cpu in cpus:
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", ",".join(map(str, cpus)))

    def capacities(self, *capacities: int) -> None:
        for cpu, capacity in enumerate(capacities):
            self.core(cpu)
            self.write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))

    def cores(self, allowed: Any) -> int:
        return count_cores(self.root, platform="linux", allowed=allowed)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def alder_lake(machine: Machine) -> Machine:
    """8 performance cores of two hyperthreads, 4 efficient ones."""
    for core in range(8):
        machine.core(2 * core, 2 * core + 1)
    for cpu in range(16, 20):
        machine.core(cpu)
    machine.write("sys/devices/cpu_core/cpus", "0-15")
    machine.write("sys/devices/cpu_atom/cpus", "16-19")
    return machine


class TestTopology:
    def test_a_hybrid_chip_computes_on_its_performance_cores(self, machine: Machine) -> None:
        assert alder_lake(machine).cores(range(20)) == 8

    def test_a_process_that_may_use_a_part_of_a_hybrid_chip_computes_on_that(self, machine: Machine) -> None:
        assert alder_lake(machine).cores([0, 1, 2, 18, 19]) == 2
        assert machine.cores(range(16, 20)) == 4

    @pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
    def test_hyperthreads_of_a_core_count_once(self, machine: Machine, name: str) -> None:
        for core in range(32):
            machine.core(core, core + 32, name=name)
        assert machine.cores(range(64)) == 32
        assert machine.cores([0, 32]) == 1
        assert machine.cores(range(20, 40)) == 20

    @pytest.mark.parametrize(
        ("capacities", "n_cores"),
        [
            ((1024, 1024, 1024, 1024), 4),
            ((459, 459, 459, 459, 1024, 1024, 1024, 1024), 4),
            ((530, 530, 530, 530, 1020, 1020, 1024, 1024), 4),
            ((253, 253, 253, 253, 808, 808, 808, 1024), 4),
            ((900, 900, 900, 900, 1024), 5),
        ],
    )
    def test_slow_cores_are_left_out_where_others_would_wait_for_them(
        self, machine: Machine, capacities: tuple[int, ...], n_cores: int
    ) -> None:
        machine.capacities(*capacities)
        assert machine.cores(range(len(capacities))) == n_cores

    def test_capacities_that_are_not_known_for_all_are_no_reason(self, machine: Machine) -> None:
        machine.capacities(100, 1024)
        machine.core(2)
        assert machine.cores(range(3)) == 3

    @pytest.mark.parametrize("text", ["", "nonsense", "3-1", "0-", "-1", "0-99999999999", "0;1"])
    def test_lists_that_cannot_be_read_say_nothing(self, machine: Machine, text: str) -> None:
        machine.write("sys/devices/cpu_core/cpus", text)
        for cpu in range(4):
            machine.write(f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", text)
        assert machine.cores(range(4)) == 4

    def test_without_any_file_every_processor_is_a_core(self, machine: Machine) -> None:
        assert machine.cores(range(6)) == 6
        assert machine.cores([5]) == 1


class TestQuota:
    def test_a_container_computes_on_no_more_than_its_quota(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/")
        machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
        assert machine.cores(range(64)) == 2
        assert machine.cores([7]) == 1

    def test_the_least_quota_of_the_groups_around_counts(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/a.slice/b.scope")
        machine.write("sys/fs/cgroup/a.slice/cpu.max", "300000 100000")
        machine.write("sys/fs/cgroup/a.slice/b.scope/cpu.max", "max 100000")
        assert machine.cores(range(8)) == 3

    def test_a_group_that_is_not_seen_from_inside_is_that_of_the_mount(self, machine: Machine) -> None:
        for path in ("/kubepods/pod1/x", "/../../y"):
            machine.write("proc/self/cgroup", f"0::{path}")
            machine.write("sys/fs/cgroup/cpu.max", "400000 100000")
            assert machine.cores(range(64)) == 4

    @pytest.mark.parametrize("controllers", ["cpu,cpuacct", "cpu"])
    def test_the_older_control_groups_have_quotas_too(self, machine: Machine, controllers: str) -> None:
        machine.write("proc/self/cgroup", f"4:memory:/elsewhere\n1:{controllers}:/box\n0::/")
        machine.write(f"sys/fs/cgroup/{controllers}/box/cpu.cfs_quota_us", "250000")
        machine.write(f"sys/fs/cgroup/{controllers}/box/cpu.cfs_period_us", "100000")
        machine.write(f"sys/fs/cgroup/{controllers}/cpu.cfs_quota_us", "-1")
        machine.write(f"sys/fs/cgroup/{controllers}/cpu.cfs_period_us", "100000")
        assert machine.cores(range(64)) == 2

    @pytest.mark.parametrize("text", ["max 100000", "", "1 0", "-5 100000", "a b", "100000"])
    def test_what_is_no_quota_is_no_bound(self, machine: Machine, text: str) -> None:
        machine.write("proc/self/cgroup", "0::/")
        machine.write("sys/fs/cgroup/cpu.max", text)
        assert machine.cores(range(8)) == 8

    def test_less_than_a_processor_is_one_thread(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/")
        machine.write("sys/fs/cgroup/cpu.max", "50000 100000")
        assert machine.cores(range(8)) == 1


class TestOtherSystems:
    def test_macos_names_its_performance_cores(self, tmp_path: Path) -> None:
        def ask(name: str) -> int | None:
            return {"hw.perflevel0.physicalcpu": 8, "hw.physicalcpu": 10}.get(name)

        def ask_intel(name: str) -> int | None:
            return {"hw.physicalcpu": 6}.get(name)

        assert count_cores(tmp_path, platform="darwin", sysctl=ask) == 8
        assert count_cores(tmp_path, platform="darwin", sysctl=ask_intel) == 6

    def test_macos_without_an_answer_counts_processors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        assert count_cores(tmp_path, platform="darwin", sysctl=lambda _: None) == 4

    @pytest.mark.parametrize(("n_cpus", "n_cores"), [(1, 1), (4, 4), (6, 3), (16, 8)])
    def test_elsewhere_many_processors_are_taken_for_hyperthreads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_cpus: int, n_cores: int
    ) -> None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: n_cpus)
        assert count_cores(tmp_path, platform="win32") == n_cores

    def test_a_system_that_counts_nothing_has_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert count_cores(tmp_path, platform="win32") == 1

    def test_the_affinity_of_this_process_is_what_it_may_use(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 9}, raising=False)
        assert count_cores(machine.root, platform="linux") == 3


class TestCounts:
    @pytest.fixture(autouse=True)
    def eight_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threads, "count_cores", lambda: 8)

    def test_by_default_there_is_a_thread_for_every_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert ThreadCounts.choose() == ThreadCounts(8, 8)
        monkeypatch.setattr(threads, "count_cores", lambda: 1000)
        assert default_threads() == 512

    @pytest.mark.parametrize(("leave", "n"), [(1, 7), (7, 1), (8, 1), (512, 1)])
    def test_cores_are_left_to_others_but_for_one(self, leave: int, n: int) -> None:
        assert ThreadCounts.choose(leave_cores=leave) == ThreadCounts(n, n)

    def test_prefill_has_as_many_as_decode_where_nothing_else_is_asked_for(self) -> None:
        assert ThreadCounts.choose(3) == ThreadCounts(3, 3)
        assert ThreadCounts.choose(3, 5) == ThreadCounts(3, 5)
        assert ThreadCounts.choose(None, 5, 2) == ThreadCounts(6, 5)

    def test_a_step_of_one_token_decodes(self) -> None:
        counts = ThreadCounts(2, 6)
        assert [counts.of_step(n) for n in (1, 2, 512)] == [2, 6, 6]
        assert (counts.are_same, ThreadCounts(2, 2).are_same) == (False, True)

    @pytest.mark.parametrize("wrong", [0, -1, 513, 1.5, "x", True])
    def test_what_is_no_number_of_threads_is_refused_by_its_name(self, wrong: Any) -> None:
        with pytest.raises(OptionError, match=f"^threads must be 1 to 512, asked for {wrong!r}"):
            ThreadCounts.choose(wrong)
        with pytest.raises(OptionError, match=f"^threads_batch must be 1 to 512, asked for {wrong!r}"):
            ThreadCounts.choose(2, wrong)

    @pytest.mark.parametrize("wrong", [-1, 513, 1.5, "x", True, None])
    def test_what_is_no_number_of_cores_is_refused(self, wrong: Any) -> None:
        with pytest.raises(OptionError, match=f"leave_cores must be 0 to 512, asked for {wrong!r}"):
            ThreadCounts.choose(leave_cores=wrong)

    def test_a_number_that_is_given_is_not_lowered(self) -> None:
        with pytest.raises(OptionError, match="3 threads are asked for"):
            ThreadCounts.choose(3, leave_cores=1)
