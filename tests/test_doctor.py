"""The doctor on simulated machines, with packages missing or broken, and on this one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa3gen import cli
from fa3gen.compile import toolchain
from fa3gen.compile.cache_contents import Contents
from fa3gen.doctor import doctor
from fa3gen.doctor.doctor import Ability, Check, Findings, Report, Trial, diagnose, run_probes, summarize_evidence

H200 = {"driver": "13.0", "gpus": [{"name": "NVIDIA H200", "capability": [9, 0]}]}
B200 = {"driver": "13.0", "gpus": [{"name": "NVIDIA B200", "capability": [10, 0]}]}
NO_GPU: dict[str, Any] = {"driver": None, "gpus": []}
CPU_TORCH = {"version": "2.13.0+cpu", "cuda": None, "usable": False, "cudnn": None}
CUDA_TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "usable": True, "cudnn": 91900}


def facts(**values: Any) -> dict[str, Any]:
    return {"facts": values}


MACHINE = Findings(
    python=(3, 11, 7),
    packages={
        "fa3gen": "0.1.0",
        toolchain.DSL_PACKAGE: "4.8.1",
        "apache-tvm-ffi": "0.1.15",
        "torch": "2.13.0",
        **{name: "1.0" for name in ("black", "jinja2", "pydantic", "ruamel.yaml", "rich", "typer")},
    },
    tools={"cuobjdump": "/bin/cuobjdump", "nvdisasm": "/bin/nvdisasm"},
    probes={
        "driver": {"facts": NO_GPU},
        "tvm_ffi": facts(installed=True),
        "torch": {"facts": CPU_TORCH},
        "flash_attn.cute": facts(installed=False),
        "flash_attn_interface": facts(installed=False),
    },
    trial=Trial(seconds=1.7, ptxas="12.9.83"),
    cache=Contents(Path("/cache"), (), ""),
)


def without(package: str) -> Findings:
    return replace(MACHINE, packages={**MACHINE.packages, package: None})


def probed(**changes: dict[str, Any]) -> Findings:
    return replace(MACHINE, probes={**MACHINE.probes, **changes})


def check(report: Report, name: str) -> Check:
    (found,) = (check for check in report.checks if check.name == name)
    return found


def abilities(report: Report) -> dict[str, Ability]:
    return {ability.name.split(" (")[0]: ability for ability in report.abilities}


def test_machine_without_a_gpu_is_healthy() -> None:
    report = diagnose(MACHINE)
    assert report.healthy
    assert {name: ability.works for name, ability in abilities(report).items()} == {
        "render": True,
        "compile": True,
        "verify on the CPU model of sm_90a": True,
        "verify on a GPU": False,
        "bench": False,
    }
    assert abilities(report)["bench"].why == "no NVIDIA GPU with a working driver here"
    assert check(report, "compiling for sm_90a").found == "ptxas 12.9.83; a trial kernel took 1.7 s"
    assert check(report, "torch").found == "2.13.0+cpu, built for the CPU only"
    assert check(report, "CuTe DSL") == Check("CuTe DSL", "ok", "4.8.1")
    assert check(report, "compile cache").found.startswith("/cache: 0 entries, 0.0 MB; can be written")


def test_a_cache_that_cannot_be_written_is_named() -> None:
    report = diagnose(replace(MACHINE, cache=Contents(Path("/dev/null"), (), "/dev/null is not a directory")))
    assert check(report, "compile cache") == Check(
        "compile cache",
        "note",
        "/dev/null: 0 entries, 0.0 MB; nothing can be kept in it: /dev/null is not a directory",
        "set $FA3GEN_CACHE_DIR to a directory that can be written",
    )
    assert report.healthy


def test_hopper_with_cuda_torch_can_do_everything() -> None:
    report = diagnose(probed(driver={"facts": H200}, torch={"facts": CUDA_TORCH}))
    assert report.healthy
    assert all(ability.works for ability in report.abilities)
    assert check(report, "GPU") == Check("GPU", "ok", "NVIDIA H200 (compute capability 9.0)")
    assert check(report, "NVIDIA driver").found == "supports CUDA 13.0"
    assert check(report, "peer: cuDNN through torch SDPA") == Check(
        "peer: cuDNN through torch SDPA", "ok", "cuDNN 91900"
    )


def test_hopper_with_cpu_torch_says_how_to_mend_it() -> None:
    report = diagnose(probed(driver={"facts": H200}))
    assert report.healthy
    assert check(report, "torch").status == "note"
    assert "cannot use the GPU that is here" in check(report, "torch").found
    verify = abilities(report)["verify on a GPU"]
    assert (verify.works, verify.why) == (False, "this torch cannot use the GPU")
    assert "CUDA build" in verify.mend


def test_other_gpu_compiles_but_does_not_run() -> None:
    report = diagnose(probed(driver={"facts": B200}, torch={"facts": CUDA_TORCH}))
    assert report.healthy
    assert check(report, "GPU").found == "NVIDIA B200 (compute capability 10.0): not Hopper"
    assert abilities(report)["compile"].works
    assert abilities(report)["bench"].why == "NVIDIA B200 is not Hopper"


def test_driver_that_does_not_start() -> None:
    report = diagnose(probed(driver=facts(driver="12.8", gpus=[], status=999)))
    assert report.healthy
    assert check(report, "NVIDIA driver").found == "supports CUDA 12.8, but cuInit fails with 999"
    assert not abilities(report)["bench"].works


def test_driver_that_kills_the_process() -> None:
    report = diagnose(probed(driver={"error": "the process ended with status -11"}))
    assert "could not be asked: the process ended with status -11" in check(report, "NVIDIA driver").found
    assert check(report, "GPU").found.startswith("none")


@pytest.mark.parametrize(
    ("findings", "name", "found", "mend"),
    [
        (without(toolchain.DSL_PACKAGE), "CuTe DSL", "not installed", "pip install 'nvidia-cutlass-dsl>=4.8,<4.9'"),
        (without("apache-tvm-ffi"), "apache-tvm-ffi", "not installed", "pip install 'apache-tvm-ffi>=0.1.12,<0.2'"),
        (without("jinja2"), "rendering packages", "missing: jinja2", "pip install jinja2"),
        (
            replace(MACHINE, tools={"cuobjdump": None, "nvdisasm": "/bin/nvdisasm"}),
            "cuobjdump",
            "not found",
            "pip install nvidia-cuda-cuobjdump",
        ),
        (replace(MACHINE, python=(3, 10, 2)), "Python", "3.10.2", "use Python 3.11 or newer"),
        (
            probed(tvm_ffi={"error": "OSError: libtvm_ffi.so"}),
            "apache-tvm-ffi",
            "0.1.15, but it cannot be imported: OSError: libtvm_ffi.so",
            "pip install 'apache-tvm-ffi>=0.1.12,<0.2'",
        ),
    ],
)
def test_what_the_tool_needs_is_broken(findings: Findings, name: str, found: str, mend: str) -> None:
    report = diagnose(findings)
    assert not report.healthy
    assert check(report, name) == Check(name, "broken", found, mend)
    broken = [ability for ability in report.abilities if not ability.works]
    assert broken and any(name in ability.why and mend in ability.mend for ability in broken)


@pytest.mark.parametrize(
    ("version", "probe", "found"),
    [
        (None, {"error": "ModuleNotFoundError: No module named 'torch'"}, "not installed"),
        ("2.13.0", {"error": "ImportError: libc10.so"}, "2.13.0, but it cannot be imported: ImportError: libc10.so"),
    ],
)
def test_torch_missing_or_broken(version: str | None, probe: dict[str, Any], found: str) -> None:
    findings = replace(probed(torch=probe), packages={**MACHINE.packages, "torch": version})
    report = diagnose(findings)
    assert not report.healthy
    assert check(report, "torch").found == found
    assert "pip install torch" in check(report, "torch").mend
    assert abilities(report)["render"].works
    assert not abilities(report)["compile"].works


def test_dsl_outside_the_window_is_noted() -> None:
    report = diagnose(replace(MACHINE, packages={**MACHINE.packages, toolchain.DSL_PACKAGE: "4.9.0"}))
    assert report.healthy
    assert check(report, "CuTe DSL").status == "note"
    assert check(report, "CuTe DSL").found == "4.9.0, outside the supported window 4.8.x"


def test_trial_that_fails_breaks_compiling_only() -> None:
    report = diagnose(replace(MACHINE, trial=Trial(error="error: no ptxas\n  more lines")))
    assert not report.healthy
    assert abilities(report)["render"].works
    compiling = abilities(report)["compile"]
    assert compiling.why == "compiling for sm_90a: error: no ptxas"
    assert "nvidia-cutlass-dsl" in compiling.mend


def test_broken_peer_is_only_a_note() -> None:
    report = diagnose(probed(**{"flash_attn.cute": {"error": "ImportError: undefined symbol"}}))
    assert report.healthy
    peer = check(report, "peer: flash-attn-4 (flash_attn.cute)")
    assert (peer.status, peer.mend) == ("note", "reinstall flash-attn-4")


def test_probe_names_are_those_of_the_script() -> None:
    from fa3gen.doctor import probe as doctor_probe

    assert tuple(doctor_probe.PROBES) == doctor.PROBES


def test_probes_that_were_never_reached() -> None:
    report = diagnose(replace(MACHINE, probes={}))
    assert not report.healthy
    assert "not looked at" in check(report, "torch").found


# The probe process


def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_broken_torch_does_not_stop_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, "torch", "raise ImportError('libc10.so: cannot open shared object file')\n")
    answers = run_probes()
    assert answers["torch"]["error"] == "ImportError: libc10.so: cannot open shared object file"
    assert answers["flash_attn_interface"]["facts"] == {"installed": False}


def test_torch_that_kills_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, "torch", "import os\nos._exit(139)\n")
    answers = run_probes()
    assert answers["torch"]["error"] == "the process ended with status 139"
    assert "facts" in answers["driver"]
    assert answers["flash_attn_interface"]["facts"] == {"installed": False}


def test_torch_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, "torch", "import time\ntime.sleep(60)\n")
    answers = run_probes(timeout_s=5)
    assert answers["torch"]["error"] == "no answer within 5 s"
    assert "tvm_ffi" not in answers


def test_chatter_on_import_does_not_spoil_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, "torch", "print('hello from torch')\nraise SystemExit('no')\n")
    assert run_probes()["torch"]["error"] == "SystemExit: no"


def test_broken_cutlass_is_reported_by_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("raise ImportError('GLIBC_2.38 not found')\n")
    # A directory named in a .pth file comes after PYTHONPATH, so the impostor wins unless the DSL puts itself first.
    monkeypatch.setattr(doctor, "_KERNEL", tmp_path / "kernel.py")
    (tmp_path / "kernel.py").write_text(
        "import sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'cutlass']:\n"
        "    del sys.modules[name]  # the worker has imported the real one\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\nimport cutlass\n"
    )
    trial = doctor.try_compiling()
    assert "ImportError: GLIBC_2.38 not found" in trial.error


# Evidence


def record_text(stem: str, **changes: Any) -> str:
    """A passing record of the module `stem` of the test below, with some of its fields changed."""
    digest = hashlib.sha256(f"# {stem}".encode()).hexdigest()
    return json.dumps({"dsl": "4.8.1", "passed": True, "source_sha256": digest, **changes})


def test_only_a_passing_record_of_the_present_file_verifies(tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "__init__.py").write_text("")
    records: dict[str, str | None] = {
        "good": record_text("good"),
        "older": record_text("older", dsl="4.8.0"),
        "failed": record_text("failed", passed=False),
        "silent": record_text("silent", passed=None),
        "stale": record_text("another"),
        "anyone": json.dumps({"dsl": "4.8.1", "passed": True}),
        "garbage": "{not json",
        "list": "[1, 2]",
        "odd": record_text("odd", dsl=4),
        "none": None,
    }
    for stem, record in records.items():
        (tmp_path / f"{stem}.py").write_text(f"# {stem}")
        if record is not None:
            (tmp_path / "evidence" / f"{stem}.json").write_text(record)
    summary = summarize_evidence(tmp_path, "4.8.1")
    assert summary.verified == ("good",)
    assert summary.other_dsl == {"older": "4.8.0"}
    assert summary.unverified == ("anyone", "failed", "garbage", "list", "none", "odd", "silent", "stale")


def test_no_modules_no_evidence(tmp_path: Path) -> None:
    summary = summarize_evidence(tmp_path / "nothing", "4.8.1")
    assert (summary.verified, summary.other_dsl, summary.unverified) == ((), {}, ())


# The command


def test_doctor_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is True
    by_name = {check["name"]: check for check in document["checks"]}
    assert by_name["CuTe DSL"]["found"] == toolchain.installed_version(toolchain.DSL_PACKAGE)
    assert by_name["compiling for sm_90a"]["found"].startswith("ptxas 1")
    works = {ability["name"]: ability["works"] for ability in document["abilities"]}
    assert works["render"] and works["compile (needs no GPU)"]


def test_doctor_exits_with_1_and_says_how_to_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: without("apache-tvm-ffi"))
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "apache-tvm-ffi" in printed and "broken" in printed
    assert "pip install 'apache-tvm-ffi>=0.1.12,<0.2'" in printed
    assert "  no   bench: apache-tvm-ffi: not installed" in printed
