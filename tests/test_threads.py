"""The default number of threads: physical cores, within what the process is allowed."""

import math
import os

import pytest
import torch

from qinfer.ops.cpu import threads
from qinfer.ops.cpu.threads import default_threads, quota, set_threads, usable_cores
from tests.fake_machine import FakeMachine


class Machine(FakeMachine):
    """Its processors, and what a process may use of them."""

    def affinity(self, *cpus):
        self.patch.setattr(os, "sched_getaffinity", lambda pid: set(cpus), raising=False)

    def topology(self, *siblings, name="core_cpus_list"):
        for text in siblings:
            for cpu in map(int, text.split(",")):
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", text)

    def cpuinfo(self, *cores):
        self.write(
            "proc/cpuinfo",
            "\n\n".join(
                f"processor\t: {i}\nmodel name\t: A:B\nphysical id : {package}\ncore id : {core}"
                for i, (package, core) in enumerate(cores)
            ),
        )

    def torch_threads(self, count):
        self.patch.setattr(torch, "get_num_threads", lambda: count)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight logical processors of which nothing is known, without any limit."""
    monkeypatch.setattr(threads, "_ROOT", tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    made = Machine(tmp_path, monkeypatch)
    made.affinity(*range(8))
    made.torch_threads(64)
    return made


class TestCores:
    @pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
    def test_hardware_threads_of_a_core_count_once(self, machine, name):
        machine.topology("0,4", "1,5", "2,6", "3,7", name=name)
        assert usable_cores() == 4

    def test_only_those_that_the_mask_allows(self, machine):
        machine.topology("0,4", "1,5", "2,6", "3,7")
        machine.affinity(1, 2, 5)
        assert usable_cores() == 2

    def test_of_cpuinfo_where_there_is_no_topology(self, machine):
        machine.cpuinfo((0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1))
        assert usable_cores() == 4

    def test_processors_that_cpuinfo_does_not_place_count_each(self, machine):
        machine.cpuinfo((0, 0), (0, 0))
        assert usable_cores() == 1 + 6

    @pytest.mark.parametrize("text", ["", "processor : x\ncore id : 1", "no colon", "\x00\x01"])
    def test_odd_files_leave_the_logical_processors(self, machine, text):
        machine.write("proc/cpuinfo", text)
        assert usable_cores() == 8

    def test_without_proc_sys_or_affinity(self, machine, monkeypatch):
        """As on macOS."""
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setattr(os, "cpu_count", lambda: 6)
        assert usable_cores() == 6
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert usable_cores() == 1


class TestQuota:
    def v2(self, machine, path, text, group="/"):
        machine.write("proc/self/cgroup", f"0::{group}")
        machine.write(f"sys/fs/cgroup/{path}cpu.max", text)

    @pytest.mark.parametrize(
        ("text", "cores"),
        [
            ("200000 100000", 2),
            ("150000 100000", 2),
            ("50000 100000", 1),
            ("1000000 50000", 8),
            ("max 100000", 8),
        ],
    )
    def test_of_version_2(self, machine, text, cores):
        self.v2(machine, "", text)
        assert usable_cores() == cores

    @pytest.mark.parametrize("text", ["", "max", "lots of it", "0 0", "100000 0", "-1 100000"])
    def test_that_cannot_be_read_is_none(self, machine, text):
        self.v2(machine, "", text)
        assert quota() == math.inf

    def test_of_a_group_around_ours_counts(self, machine):
        self.v2(machine, "a/b/", "max 100000", group="/a/b/c")
        self.v2(machine, "a/", "300000 100000", group="/a/b/c")
        self.v2(machine, "", "400000 100000", group="/a/b/c")
        self.v2(machine, "other/", "100000 100000", group="/a/b/c")
        assert quota() == 3

    @pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
    @pytest.mark.parametrize("place", ["docker/abc/", ""])
    def test_of_version_1(self, machine, mount, place):
        machine.write("proc/self/cgroup", f"9:memory:/m\n4:{mount}:/docker/abc\n0::/")
        machine.write(f"sys/fs/cgroup/{mount}/{place}cpu.cfs_quota_us", "250000")
        machine.write(f"sys/fs/cgroup/{mount}/{place}cpu.cfs_period_us", "100000")
        assert quota() == 2.5
        assert usable_cores() == 3
        machine.write(f"sys/fs/cgroup/{mount}/{place}cpu.cfs_quota_us", "-1")
        assert quota() == math.inf


class TestDefault:
    def test_is_the_cores_and_not_what_torch_takes(self, machine):
        machine.topology("0,4", "1,5", "2,6", "3,7")
        assert default_threads() == 4

    def test_a_lower_number_of_torchs_wins(self, machine):
        machine.torch_threads(3)
        assert default_threads() == 3

    def test_omp_num_threads_wins_in_both_directions(self, machine, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "16")
        machine.torch_threads(16)
        assert default_threads() == 16
        monkeypatch.setenv("OMP_NUM_THREADS", "")
        assert default_threads() == 8

    def test_a_number_that_is_given_is_set_as_it_is(self, machine, monkeypatch):
        given = []
        monkeypatch.setattr(torch, "set_num_threads", given.append)
        set_threads(20)
        set_threads(None)
        assert given == [20, 8]


def test_this_machine_has_cores():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
