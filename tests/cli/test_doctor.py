"""The doctor's checks on described environments, healthy and broken, and the command itself on this machine."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from shardkit.cli import cluster, devices, doctor, packages, surroundings, versions
from shardkit.cli.findings import NOTE, PROBLEM
from shardkit.cli.known_bad import KNOWN_BAD, Setup, check_known_bad
from shardkit.cli.main import main

ROOT = pathlib.Path(__file__).resolve().parents[2]


def names(findings, level=None):
    return [finding.name for finding in findings if level in (None, finding.level)]


class TestVersions:
    def test_are_sorted_as_pip_does(self):
        in_order = ["0.9", "0.10.0.dev1", "0.10.0a1", "0.10rc1", "0.10", "0.10.0.post1", "0.10.0.1", "0.10.2", "1.0"]
        assert sorted(set(in_order), key=versions.key) == in_order
        assert versions.key("0.10") == versions.key("0.10.0") == versions.key("0.10.0+cuda12")

    @pytest.mark.parametrize(
        ("specifiers", "version", "allowed"),
        [
            ("", "0", True),
            (">=0.10.0", "0.9.9", False),
            (">=0.11,<0.12", "0.11.5", True),
            ("<=0.12.0.1,>=0.11.2", "0.12.0.1", True),
            ("<=0.10.2,>=0.10.1", "0.10.0", False),
            ("==0.0.42.*", "0.0.43", False),
            ("!=0.12.11", "0.12.11", False),
            ("~=1.4.2", "1.4.9", True),
            ("~=1.4.2", "1.5", False),
            (">1", "1.0", False),
            (">=0.12", "0.12.0.dev3", False),
        ],
    )
    def test_ranges(self, specifiers, version, allowed):
        assert versions.allows(specifiers, version) is allowed

    def test_requirements_are_read_with_their_markers(self):
        assert versions.parse_requirement("jax >= 0.6.0", "3.11").specifiers == ">=0.6.0"
        found = versions.parse_requirement("jax-cuda12-plugin[with-cuda]<=0.10.2; extra == 'cuda12'", "3.11")
        assert (found.name, found.extras, found.extra) == ("jax-cuda12-plugin", ("with-cuda",), "cuda12")
        assert versions.parse_requirement('numpy>=2.1; python_version >= "3.13"', "3.11.4") is None
        assert versions.parse_requirement('numpy>=2.1; python_version >= "3.13"', "3.13.0") is not None
        assert versions.parse_requirement('pywin32; sys_platform == "win32"', "3.11.4") is None

    def test_bad_ones_are_refused(self):
        with pytest.raises(ValueError, match="'new' is not a version such as"):
            versions.key("new")
        with pytest.raises(ValueError, match="is no requirement such as"):
            versions.parse_requirement("???", "3.11")


OWN = packages.Own(
    "0.1.0",
    ">=3.11,<3.14",
    (
        "flax>=0.12",
        "jax>=0.10.0",
        "numpy>=2.0",
        'tqdm>=4.66; extra == "examples"',
        'pytest>=8.3; extra == "test"',
        'ruff>=0.14; extra == "dev"',
        'shardkit[examples,test]; extra == "dev"',
        'jax[tpu]; extra == "tpu-target"',
    ),
    "shardkit",
)
FIT = {"flax": "0.12.8", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6"}


class TestPackages:
    def test_those_in_range_are_fine(self):
        rows, findings = packages.check_ranges(OWN, "3.11.7", FIT.get)
        assert not findings
        assert [row.name for row in rows] == ["python", "shardkit", "jax", "jaxlib", "flax", "numpy"]
        assert all(row.fits for row in rows)

    @pytest.mark.parametrize(
        ("python", "changed", "wanted"),
        [
            ("3.10.4", {}, "Python 3.10.4"),
            ("3.14.0", {}, "Python 3.14.0"),
            ("3.11.7", {"numpy": "1.26.4"}, "numpy 1.26.4"),
            ("3.11.7", {"jax": "0.9.2"}, "jax 0.9.2"),
            ("3.11.7", {"flax": None}, "flax missing"),
            ("3.11.7", {"jaxlib": None}, "jaxlib missing"),
        ],
    )
    def test_those_out_of_range_are_problems(self, python, changed, wanted):
        rows, findings = packages.check_ranges(OWN, python, {**FIT, **changed}.get)
        assert names(findings, PROBLEM) == [wanted]
        assert [row.fits for row in rows].count(False) == 1
        assert findings[0].todo

    def test_newer_than_tested_is_a_note(self):
        _, findings = packages.check_ranges(OWN, "3.12.1", {**FIT, "jax": "0.13.0", "jaxlib": "0.13.0"}.get)
        assert names(findings, NOTE) == names(findings) == ["jax 0.13.0"]

    @pytest.mark.parametrize(
        ("installed", "requires", "wanted"),
        [
            ({"jax": "0.10.2", "jaxlib": "0.10.0"}, {"jax": ["jaxlib<=0.10.2,>=0.10.1"]}, ["jax and jaxlib"]),
            ({"jax": "0.10.2", "flax": "0.12.12"}, {"flax": ["jax>=0.11.1"]}, ["flax and jax"]),
            ({"jax": "0.12.0", "numpy": "2.1"}, {"jax": ["numpy>=2.2"]}, ["jax and numpy"]),
            (
                {"jax": "0.10.2", "libtpu": "0.0.30"},
                {"jax": ['libtpu==0.0.42.*; extra == "tpu"']},
                ["jax and libtpu"],
            ),
            ({"jax": "0.10.2", "libtpu": "0.0.42.1"}, {"jax": ['libtpu==0.0.42.*; extra == "tpu"']}, []),
            ({"jax": "0.10.2", "jaxlib": "0.10.2"}, {"jax": ['jaxlib==0.10.1; extra == "minimum-jaxlib"']}, []),
            ({"jax": "0.10.2"}, {"jax": ["scipy>=99"]}, []),
        ],
    )
    def test_what_they_need_of_each_other(self, installed, requires, wanted):
        findings = packages.check_each_other(installed, requires, "3.11.7")
        assert names(findings, PROBLEM) == wanted
        assert all("metadata" in finding.source for finding in findings)

    def test_extras_say_what_is_missing(self):
        here = {"tqdm": "4.70", "pytest": "7.0", "libtpu": "0.0.42"}
        jax = ('libtpu==0.0.42.*; extra == "tpu"',)
        found = packages.read_extras(OWN, "3.11.7", {**FIT, **here}.get, lambda name: jax if name == "jax" else ())
        missing = {extra.name: extra.missing for extra in found}
        assert missing == {
            "examples": (),
            "test": ("pytest>=8.3",),
            "dev": ("ruff>=0.14", "pytest>=8.3"),
            "tpu-target": (),
        }
        assert found[1].command == "pip install 'shardkit[test]'"

    def test_requirements_are_those_of_the_project(self):
        own = packages.read_own()
        assert any(line.startswith("jax>=") for line in own.requires)
        assert {"examples", "test", "dev"} <= {extra.name for extra in packages.read_extras(own, "3.11.7", {}.get)}


class TestKnownBad:
    @pytest.mark.parametrize(
        ("setup", "wanted"),
        [
            (Setup({"jax": "0.12.0.1", "flax": "0.12.9"}), "flax older than jax"),
            (Setup({"jax": "0.12.0.1", "flax": "0.12.11"}), "flax 0.12.11"),
            (Setup({"jaxlib": "0.9.0.1", "jax-cuda12-plugin": "0.9.2"}), "CUDA plugin of another version than jaxlib"),
            (Setup({"jaxlib": "0.10.2", "jax-cuda13-pjrt": "0.11"}), "CUDA plugin of another version than jaxlib"),
            (Setup({"jaxlib": "0.11.0"}, frozenset({"gpu"})), "slow float32 scatter-add on GPU"),
            (
                Setup({"jaxlib": "0.10.2"}, frozenset({"cpu"}), machine="Linux-x86_64"),
                "CPU crash on products of rank 7 and 8",
            ),
            (
                Setup({"jax": "0.11.1"}, env={"JAX_USE_SHARDY_PARTITIONER": "False"}),
                "partly manual shard_map without Shardy",
            ),
            (Setup({"jaxlib": "0.12.0"}, frozenset({"cpu"}), several=True), "reduce-scatter between CPU processes"),
            (Setup({"jaxlib": "0.12.0"}, frozenset({"cpu"})), "all-reduce of maxima on CPU drops NaNs"),
            (Setup({"jax": "0.11.0"}), "derivative of nested shard_maps"),
            (Setup({"jaxlib": "0.10.2"}, cpu_devices=8, cores=15), "many programs under way on simulated devices"),
            (
                Setup({"jaxlib": "0.11.2"}, env={"PJRT_NPROC": "9"}, cpu_devices=8, cores=64),
                "many programs under way on simulated devices",
            ),
        ],
    )
    def test_is_found(self, setup, wanted):
        assert wanted in names(check_known_bad(setup))

    @pytest.mark.parametrize(
        "setup",
        [
            Setup({}),
            Setup(
                {"jax": "0.13", "jaxlib": "0.13", "flax": "0.13"}, frozenset({"cpu", "gpu"}), {}, True, "Linux-x86_64"
            ),
            Setup({"jaxlib": "0.10.2+local", "jax-cuda12-plugin": "0.10.2"}),
            Setup({"jaxlib": "0.10.2"}, cpu_devices=8, cores=16),
            Setup({"jaxlib": "0.10.2"}, cpu_devices=1, cores=1),
            Setup({"jaxlib": "0.10.2"}, env={"PJRT_NPROC": "16"}, cpu_devices=8, cores=2),
            Setup({"jaxlib": "0.10.2"}, env={"NPROC": "16"}, cpu_devices=8, cores=2),
            Setup({"jaxlib": "0.12.0"}, cpu_devices=8, cores=2),
        ],
    )
    def test_nothing_else_is(self, setup):
        assert not check_known_bad(setup)

    def test_each_has_a_source_and_something_to_do(self):
        assert len({known.name for known in KNOWN_BAD}) == len(KNOWN_BAD)
        for known in KNOWN_BAD:
            assert known.todo
            assert re.search(r"#\d+|seen here|PyPI", known.source)


class TestEnvironment:
    @pytest.mark.parametrize(
        ("env", "wanted"),
        [
            ({}, []),
            ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, []),
            ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "8"}, []),
            (
                {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"},
                ["two numbers of CPU devices"],
            ),
            ({"XLA_FLAGS": "-\u2013xla_dump_to=x"}, ["XLA_FLAGS"]),
            ({"XLA_FLAGS": "--xla_a=1 --xla_a=2"}, ["XLA_FLAGS"]),
            ({"XLA_FLAGS": "--xla_a=1 --xla_a=1 --xla_b"}, []),
            ({"XLA_FLAGS": "--xla_tpu_enable_x=true"}, ["XLA_FLAGS"]),
            ({"XLA_FLAGS": "--xla_a='1"}, []),
            ({"JAX_NUM_CPU_DEVICES": "many"}, ["JAX_NUM_CPU_DEVICES"]),
            ({"JAX_NUM_CPU_DEVICES": "0"}, ["JAX_NUM_CPU_DEVICES"]),
            ({"JAX_PLATFORMS": "cpu"}, []),
            ({"JAX_PLATFORMS": "cuda,cpu"}, ["JAX_PLATFORMS"]),
            ({"JAX_PLATFORMS": "tpu"}, ["JAX_PLATFORMS"]),
        ],
    )
    def test_contradictions_are_problems(self, env, wanted):
        assert names(surroundings.check_environment(env, {}), PROBLEM) == wanted

    def test_accelerators_that_are_hidden_or_missing(self):
        plugin = {"jax-cuda12-plugin": "0.10.2"}
        assert names(surroundings.check_environment({"CUDA_VISIBLE_DEVICES": ""}, plugin), NOTE)
        assert not surroundings.check_environment({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda"}, plugin)
        assert names(surroundings.check_environment({"LIBTPU_INIT_ARGS": "--a"}, {}), NOTE) == ["LIBTPU_INIT_ARGS"]

    def test_only_what_matters_is_shown(self):
        env = {"PATH": "x", "TPU_WORKER_ID": "0", "XLA_FLAGS": "", "AWS_SECRET": "s"}
        assert surroundings.relevant(env) == {"TPU_WORKER_ID": "0", "XLA_FLAGS": ""}


class TestCluster:
    @pytest.mark.parametrize(
        ("env", "wanted"),
        [
            ({}, []),
            ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "16", "SLURM_PROCID": "3"}, [("SLURM", 3, 16)]),
            ({"SLURM_JOB_ID": "9"}, [("SLURM", None, None)]),
            ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, [("Open MPI", 0, 4)]),
            ({"PMI_SIZE": "2", "PMI_RANK": "1"}, [("MPI (PMI)", 1, 2)]),
            ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, [("Cloud TPU", 1, 2)]),
            ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "5"}, [("Kubernetes", 5, None)]),
            ({"JAX_COORDINATOR_ADDRESS": "a:1"}, [("JAX's own variables", None, None)]),
        ],
    )
    def test_launchers_are_found(self, env, wanted):
        found = cluster.detect(env)
        assert [(c.name, c.index, c.processes) for c in found] == wanted
        assert cluster.several(found) is any((n or 1) > 1 for *_, n in wanted)
        assert all(c.evidence and c.start.startswith("sk.initialize(") for c in found)

    @pytest.mark.parametrize(
        ("env", "wanted"),
        [
            ({"PMI_SIZE": "2", "PMI_RANK": "2"}, [(PROBLEM, "MPI (PMI)")]),
            ({"OMPI_COMM_WORLD_SIZE": "1"}, [(NOTE, "Open MPI")]),
            ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1"}, []),
            ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [(NOTE, "Kubernetes")]),
            ({"JAX_COORDINATOR_ADDRESS": "host"}, [(PROBLEM, "JAX_COORDINATOR_ADDRESS")]),
            ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "1"}, [(NOTE, "SLURM")]),
            ({"PMI_SIZE": "2", "https_proxy": "http://p"}, [(NOTE, "proxies")]),
            ({"https_proxy": "http://p"}, []),
        ],
    )
    def test_what_keeps_them_apart(self, env, wanted):
        findings = cluster.check_cluster(cluster.detect(env), env, {}.get)
        assert [(f.level, f.name) for f in findings] == wanted


def answer(*found, **more):
    told = {"devices": list(found), "processes": 1, "index": 0, **more}
    return f"noise\n{devices._MARK}{json.dumps(told)}\n"


class TestDevices:
    def test_are_grouped(self):
        cpu = {"platform": "cpu", "kind": "cpu", "process": 0, "slice": None, "memory": None}
        gpus = [{"platform": "gpu", "kind": "H200", "process": p, "slice": None, "memory": 7} for p in (0, 0, 1, 1)]
        found = devices.read_answer(answer(*gpus, cpu, processes=2, index=1), "", 0)
        assert found.groups == (devices.Group("gpu", "H200", 4, 7), devices.Group("cpu", "cpu", 1, None))
        assert (found.count, found.hosts, found.processes, found.index) == (5, 2, 2, 1)
        assert not devices.check_devices(found)

    def test_one_cpu_device_is_a_note(self):
        (found,) = devices.check_devices(devices.Devices((devices.Group("cpu", "cpu", 1, None),)))
        assert found.level == NOTE
        assert "jax_num_cpu_devices" in found.todo

    @pytest.mark.parametrize(
        ("stdout", "stderr", "status", "said", "todo"),
        [
            (
                "",
                "noise\nF1130 a.cc:1] Unknown flag in XLA_FLAGS: --x\nbye",
                -6,
                "Unknown flag in XLA_FLAGS",
                "take the",
            ),
            (
                answer(error="RuntimeError: Unable to initialize backend 'tpu': no"),
                "",
                0,
                "backend 'tpu'",
                "unset JAX_P",
            ),
            (answer(error="RuntimeError: jaxlib version 1 is incompatible"), "", 0, "jaxlib version 1", "pip install"),
            ("", "", -11, "ended with status -11: it said nothing", ""),
        ],
    )
    def test_a_jax_that_does_not_start_is_a_problem(self, stdout, stderr, status, said, todo):
        (found,) = devices.check_devices(devices.read_answer(stdout, stderr, status))
        assert found.level == PROBLEM
        assert said in found.happens
        assert todo in found.todo

    @pytest.mark.not_smoke
    def test_a_jax_that_hangs_is_given_up(self, monkeypatch):
        monkeypatch.setattr(
            devices, "_ASK", "import sys, time; print('waiting', file=sys.stderr, flush=True); time.sleep(60)"
        )
        error = devices.ask(os.environ, 0.5).error
        assert "didn't start within 0.5 s" in error

    def test_a_tpu_is_not_looked_for_where_there_is_none(self):
        assert devices.environment_to_ask_in({"A": "b"}, has_chips=False) == {"A": "b", "TPU_SKIP_MDS_QUERY": "1"}
        assert devices.environment_to_ask_in({"A": "b"}, has_chips=True) == {"A": "b"}
        assert devices.environment_to_ask_in({"TPU_NAME": "b"}, has_chips=False) == {"TPU_NAME": "b"}

    @pytest.mark.parametrize(
        ("count", "hosts", "wanted"),
        [
            (1, 1, [{"dp": 1}]),
            (2, 1, [{"dp": 2}, {"sp": 2}]),
            (6, 1, [{"dp": 6}, {"dp": 3, "sp": 2}, {"dp": 2, "tp": 3}]),
            (8, 1, [{"dp": 8}, {"dp": 4, "sp": 2}, {"dp": 2, "tp": 4}]),
            (16, 2, [{"dp": 16}, {"dp": 2, "tp": 8}, {"dp": 2, "sp": 8}, {"dp": 2, "sp": 2, "tp": 4}]),
            (4, 4, [{"dp": 4}, {"dp": 2, "sp": 2}, {"dp": 2, "tp": 2}]),
        ],
    )
    def test_meshes_use_all_devices(self, count, hosts, wanted):
        found = [axes for axes, _ in devices.suggest_meshes(count, hosts)]
        assert found == wanted


EIGHT = devices.Devices((devices.Group("cpu", "cpu", 8, None),))


class TestCommand:
    @pytest.fixture(autouse=True)
    def healthy(self, monkeypatch):
        monkeypatch.setattr(devices, "to_ask", lambda timeout: EIGHT)
        monkeypatch.setattr(os, "environ", {"XLA_FLAGS": "--xla_a=1", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"})

    def test_prints_all_it_saw(self, capsys):
        assert main(["doctor"]) == 0
        text = capsys.readouterr().out
        for wanted in ("Versions", "jaxlib", 'sk.make_mesh({"dp": 4, "sp": 2})', "SLURM", "--xla_a=1", "examples"):
            assert wanted in text
        assert text.endswith("no problem found\n")
        assert "\x1b" not in text

    def test_a_problem_is_told_and_is_the_exit_status(self, capsys, monkeypatch):
        monkeypatch.setattr(os, "environ", {"JAX_NUM_CPU_DEVICES": "none [bold]"})
        assert main(["doctor", "--no-devices"]) == 1
        text = capsys.readouterr().out
        assert "problem: JAX_NUM_CPU_DEVICES\n  'none [bold]' is no positive number" in text
        assert text.endswith("1 problem found\n")

    def test_json_is_for_tools(self, capsys):
        assert main(["doctor", "--json"]) == 0
        seen = json.loads(capsys.readouterr().out)
        assert seen["problems"] == 0
        assert seen["devices"]["count"] == 8
        assert seen["meshes"][1]["code"] == 'sk.make_mesh({"dp": 4, "sp": 2})'
        assert {"level", "name", "happens", "todo", "source"} == set(seen["findings"][0])

    @pytest.mark.parametrize("words", [[], ["docter"], ["doctor", "--timeout", "soon"], ["doctor", "--timeout", "-1"]])
    def test_wrong_usage_is_status_2(self, words, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "usage: python -m shardkit" in capsys.readouterr().err

    def test_says_whether_jax_distributed_runs(self):
        assert doctor.examine({}, EIGHT).distributed is False


def doctor_process(*command, **env):
    given = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
    given.pop("XLA_FLAGS", None)
    command = [sys.executable, "-W", "error", *command, "doctor", "--json"]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120, check=False)


def test_on_this_machine():
    done = doctor_process("-m", "shardkit", JAX_NUM_CPU_DEVICES="4")
    seen = json.loads(done.stdout)
    assert seen["devices"]["count"] == 4
    assert done.returncode == (1 if seen["problems"] else 0)
    assert done.stderr == ""
    assert seen["distributed"] is False


def test_where_the_package_cannot_be_imported(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('jaxlib version 9 is newer than and incompatible with jax')")
    done = doctor_process(str(ROOT / "shardkit"), PYTHONPATH=str(tmp_path))
    seen = json.loads(done.stdout)
    assert done.returncode == 1
    assert [f["happens"] for f in seen["findings"] if f["name"] == "JAX doesn't start"] == [
        "RuntimeError: jaxlib version 9 is newer than and incompatible with jax"
    ]
    assert seen["distributed"] is None
