"""What this machine can do with fa3gen, what it cannot, and how to mend it.

Nothing that may be missing or broken is imported here: packages and the driver are looked at by a process of their own
(`fa3gen.doctor.probe`), and whether the DSL compiles is shown by compiling a tiny kernel (`fa3gen.doctor.kernel`).
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fa3gen.base import files
from fa3gen.base.errors import UserError
from fa3gen.compile import toolchain
from fa3gen.compile.cache import CACHE_DIR_VARIABLE, cache_directory
from fa3gen.compile.cache_contents import Contents, contents
from fa3gen.run.gpu import HOPPER

MIN_PYTHON = (3, 11)

# Names that fa3gen/doctor/probe.py knows; torch comes before what imports it, to be named when it kills the process.
PROBES = ("driver", "torch", "tvm_ffi", "flash_attn.cute", "flash_attn_interface")

_PROBE = Path(__file__).with_name("probe.py")
_KERNEL = Path(__file__).with_name("kernel.py")
_PROBE_TIMEOUT_S = 120.0
_COMPILE_TIMEOUT_S = 120.0
_INSTALL_DSL = f"pip install '{toolchain.DSL_PACKAGE}>=4.8,<4.9'"
_INSTALL_TORCH = "pip install torch (for a GPU: the CUDA build, see https://pytorch.org/get-started/locally)"
_RENDER_PACKAGES = ("black", "jinja2", "pydantic", "ruamel.yaml", "rich", "typer")

Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Check:
    """One thing looked at; `mend` says what to do about it, if anything.

    "broken" is for what the tool itself needs, "note" for what is worth knowing beside that.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Ability:
    """One thing a user may want to do here, and whether it works; `why` and `mend` speak when it does not."""

    name: str
    works: bool
    why: str = ""
    mend: str = ""


@dataclass(frozen=True)
class EvidenceSummary:
    """GPU evidence of the committed modules, against the installed DSL.

    Stems by what their record says: verified with the installed DSL, verified with another one (stem -> version),
    without a passing record.
    """

    dsl: str | None
    verified: tuple[str, ...]
    other_dsl: Mapping[str, str]
    unverified: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything the doctor found."""

    checks: tuple[Check, ...]
    abilities: tuple[Ability, ...]
    evidence: EvidenceSummary | None

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken that the tool itself needs; a missing GPU is no fault."""
        return all(check.status != "broken" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "healthy": self.healthy,
            "checks": [asdict(check) for check in self.checks],
            "abilities": [asdict(ability) for ability in self.abilities],
            "evidence": asdict(self.evidence) if self.evidence else None,
        }


@dataclass(frozen=True)
class Trial:
    """The trial compilation: seconds and ptxas's version, or the error."""

    seconds: float = 0.0
    ptxas: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Findings:
    """Raw facts, as collected: what `diagnose` judges.

    `packages` maps distributions to versions (None: not installed), `tools` cuobjdump and nvdisasm to their paths
    (None: not found), `probes` the names of `fa3gen.doctor.probe` to {"facts": ...} or {"error": ...}.
    """

    python: tuple[int, int, int]
    packages: Mapping[str, str | None]
    tools: Mapping[str, str | None]
    probes: Mapping[str, Mapping[str, Any]]
    trial: Trial
    cache: Contents


def examine(generated_dir: Path | None = None) -> Report:
    """Look at this machine; takes a few seconds. `generated_dir` holds the modules whose evidence is summed up."""
    findings = collect()
    evidence = None
    if generated_dir is not None:
        evidence = summarize_evidence(generated_dir, findings.packages[toolchain.DSL_PACKAGE])
    return diagnose(findings, evidence)


def collect() -> Findings:
    """Gather the facts. Never raises for something that is missing or broken."""
    names = ("fa3gen", toolchain.DSL_PACKAGE, "apache-tvm-ffi", "torch", *_RENDER_PACKAGES)
    with ThreadPoolExecutor(max_workers=2) as pool:  # both wait for processes: imports, and a compilation
        probes, trial = pool.submit(run_probes), pool.submit(try_compiling)
        return Findings(
            python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
            packages={name: toolchain.installed_version(name) for name in names},
            tools={name: _tool_path(name) for name in ("cuobjdump", "nvdisasm")},
            probes=probes.result(),
            trial=trial.result(),
            cache=contents(cache_directory()),
        )


def _tool_path(name: str) -> str | None:
    try:
        return str(toolchain.find_tool(name))
    except UserError:
        return None


def try_compiling() -> Trial:
    """Compile the doctor's kernel for sm_90a in a process of its own."""
    from fa3gen.compile import compiler

    try:
        compiled = compiler.compile_module(_KERNEL, timeout_s=_COMPILE_TIMEOUT_S)
    except (UserError, OSError) as error:  # OSError: no room or no right to write temporary files
        return Trial(error=str(error))
    return Trial(seconds=compiled.seconds, ptxas=compiled.ptxas)


def run_probes(timeout_s: float = _PROBE_TIMEOUT_S) -> dict[str, dict[str, Any]]:
    """Answers of the probe process by name.

    A probe that kills the process, or hangs it, is answered with that as its error. After a death the probes that it
    kept from running get a process of their own; after a hang they stay without an answer, for time has been lost.
    """
    answers: dict[str, dict[str, Any]] = {}
    left = list(PROBES)
    while left:
        output, ending, hung = _run_probe_process(left, timeout_s)
        new = _read_answers(output, ending)
        answers.update(new)
        left = [name for name in left if name not in new]
        if hung or not new:
            break
    return answers


def _run_probe_process(names: Sequence[str], timeout_s: float) -> tuple[str, str, bool]:
    """Standard output, how the process ended, and whether it had to be stopped."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_PROBE), *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(errors="replace"), f"no answer within {timeout_s:g} s", True
    return done.stdout.decode(errors="replace"), f"the process ended with status {done.returncode}", False


def _read_answers(output: str, ending: str) -> dict[str, dict[str, Any]]:
    """Answers by probe; one that began and did not finish is answered with how the process ended."""
    answers: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:  # cut short when the process died
            continue
        answers[answer["probe"]] = answer
    for answer in answers.values():
        if "facts" not in answer and "error" not in answer:
            answer["error"] = ending
    return answers


def diagnose(findings: Findings, evidence: EvidenceSummary | None = None) -> Report:
    """Judge the facts."""
    checks = (
        _python_check(findings),
        Check("fa3gen", "ok", findings.packages["fa3gen"] or "run from a checkout that is not installed"),
        _render_check(findings),
        _dsl_check(findings),
        _ptxas_check(findings),
        _cache_check(findings),
        _tvm_ffi_check(findings),
        _torch_check(findings),
        *(_tool_check(name, path) for name, path in findings.tools.items()),
        _driver_check(findings),
        _gpu_check(findings),
        _sdpa_check(findings),
        *(_peer_check(findings, module, package) for module, package in _PEERS.items()),
    )
    return Report(checks=checks, abilities=_abilities(findings, checks), evidence=evidence)


def _python_check(findings: Findings) -> Check:
    version = ".".join(str(number) for number in findings.python)
    if findings.python[:2] < MIN_PYTHON:
        wanted = ".".join(str(number) for number in MIN_PYTHON)
        return Check("Python", "broken", version, f"use Python {wanted} or newer")
    return Check("Python", "ok", f"{version} ({platform.system()} {platform.machine()})")


def _render_check(findings: Findings) -> Check:
    missing = [name for name in _RENDER_PACKAGES if findings.packages[name] is None]
    if missing:
        return Check(
            "rendering packages", "broken", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return Check("rendering packages", "ok", f"black {findings.packages['black']} and the rest are there")


def _dsl_check(findings: Findings) -> Check:
    version = findings.packages[toolchain.DSL_PACKAGE]
    if version is None:
        return Check("CuTe DSL", "broken", "not installed", _INSTALL_DSL)
    if not toolchain.dsl_supported(version):
        window = ".".join(str(number) for number in toolchain.SUPPORTED_DSL) + ".x"
        return Check("CuTe DSL", "note", f"{version}, outside the supported window {window}", _INSTALL_DSL)
    return Check("CuTe DSL", "ok", version)


def _ptxas_check(findings: Findings) -> Check:
    trial = findings.trial
    if trial.error:
        return Check("compiling for sm_90a", "broken", trial.error, f"reinstall: {_INSTALL_DSL} --force-reinstall")
    ptxas = trial.ptxas or "of unknown version"
    return Check("compiling for sm_90a", "ok", f"ptxas {ptxas}; a trial kernel took {trial.seconds:.1f} s")


def _cache_check(findings: Findings) -> Check:
    cache = findings.cache
    if cache.unwritable:
        found = f"{cache}; nothing can be kept in it: {cache.unwritable}"
        return Check("compile cache", "note", found, f"set ${CACHE_DIR_VARIABLE} to a directory that can be written")
    return Check("compile cache", "ok", f"{cache}; can be written (`fa3gen cache` lists and prunes it)")


def _tvm_ffi_check(findings: Findings) -> Check:
    version = findings.packages["apache-tvm-ffi"]
    mend = "pip install 'apache-tvm-ffi>=0.1.12,<0.2'"
    if version is None:
        return Check("apache-tvm-ffi", "broken", "not installed", mend)
    error = _error(findings, "tvm_ffi")
    if error:
        return Check("apache-tvm-ffi", "broken", f"{version}, but it cannot be imported: {error}", mend)
    return Check("apache-tvm-ffi", "ok", version)


def _torch_check(findings: Findings) -> Check:
    version = findings.packages["torch"]
    error = _error(findings, "torch")
    if version is None and (not error or "No module named 'torch'" in error):
        return Check("torch", "broken", "not installed", _INSTALL_TORCH)
    if error:
        return Check("torch", "broken", f"{version}, but it cannot be imported: {error}", _INSTALL_TORCH)
    torch = _facts(findings, "torch")
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for the CPU only"
    found = f"{torch['version']}, {build}"
    if _hopper(findings) and not torch["usable"]:
        return Check("torch", "note", f"{found}, cannot use the GPU that is here", _INSTALL_TORCH)
    return Check("torch", "ok", found)


def _tool_check(name: str, path: str | None) -> Check:
    if path is None:
        return Check(name, "broken", "not found", f"pip install nvidia-cuda-{name}")
    return Check(name, "ok", path)


def _driver_check(findings: Findings) -> Check:
    error = _error(findings, "driver")
    facts = _facts(findings, "driver")
    if error:
        return Check("NVIDIA driver", "note", f"could not be asked: {error}", "reinstall the NVIDIA driver")
    if facts["driver"] is None:
        return Check("NVIDIA driver", "note", "none (not needed to render and compile)")
    if facts.get("status"):
        return Check(
            "NVIDIA driver",
            "note",
            f"supports CUDA {facts['driver']}, but cuInit fails with {facts['status']}",
            "check that nvidia-smi works and that the container may use the GPU",
        )
    return Check("NVIDIA driver", "ok", f"supports CUDA {facts['driver']}")


def _gpu_check(findings: Findings) -> Check:
    gpus = _facts(findings, "driver").get("gpus", [])
    if not gpus:
        return Check("GPU", "note", "none (not needed to render and compile)")
    names = ", ".join(f"{gpu['name']} (compute capability {'.'.join(map(str, gpu['capability']))})" for gpu in gpus)
    if not _hopper(findings):
        return Check("GPU", "note", f"{names}: not Hopper", "sm_90a code runs on an H100, H200, H20 or GH200 only")
    return Check("GPU", "ok", names)


_PEERS = {"flash_attn.cute": "flash-attn-4", "flash_attn_interface": "flash-attn-3"}


def _sdpa_check(findings: Findings) -> Check:
    torch = _facts(findings, "torch")
    if torch.get("usable") and torch.get("cudnn"):
        return Check("peer: cuDNN through torch SDPA", "ok", f"cuDNN {torch['cudnn']}")
    return Check("peer: cuDNN through torch SDPA", "note", "needs a CUDA build of torch and a GPU")


def _peer_check(findings: Findings, module: str, package: str) -> Check:
    name = f"peer: {package} ({module})"
    error = _error(findings, module)
    if error:
        return Check(name, "note", f"installed, but it cannot be imported: {error}", f"reinstall {package}")
    if not _facts(findings, module).get("installed"):
        return Check(name, "note", "not installed; bench leaves it out")
    return Check(name, "ok", "importable")


def _abilities(findings: Findings, checks: Sequence[Check]) -> tuple[Ability, ...]:
    by_name = {check.name: check for check in checks}
    render = _ability("render", [by_name["Python"], by_name["rendering packages"]])
    toolchain_checks = [
        by_name[name] for name in ("CuTe DSL", "compiling for sm_90a", "apache-tvm-ffi", "torch", *findings.tools)
    ]
    compiling = _ability("compile (needs no GPU)", [by_name["Python"], *toolchain_checks])
    # The model needs what compiling needs, and nothing else.
    modelled = Ability("verify on the CPU model of sm_90a", compiling.works, compiling.why, compiling.mend)
    on_gpu = (_on_gpu(name, findings, compiling) for name in ("verify on a GPU", "bench"))
    return (render, compiling, modelled, *on_gpu)


def _ability(name: str, needs: Sequence[Check]) -> Ability:
    broken = [check for check in needs if check.status == "broken"]
    if not broken:
        return Ability(name, True)
    why = "; ".join(f"{check.name}: {check.found.splitlines()[0]}" for check in broken)
    return Ability(name, False, why, "; ".join(check.mend for check in broken if check.mend))


def _on_gpu(name: str, findings: Findings, compiling: Ability) -> Ability:
    if not compiling.works:
        return Ability(name, False, compiling.why, compiling.mend)
    gpus = _facts(findings, "driver").get("gpus", [])
    if not gpus:
        return Ability(
            name, False, "no NVIDIA GPU with a working driver here", "run it on a machine with an H100 or H200"
        )
    if not _hopper(findings):
        return Ability(name, False, f"{gpus[0]['name']} is not Hopper", "run it on a machine with an H100 or H200")
    if not _facts(findings, "torch").get("usable"):
        return Ability(name, False, "this torch cannot use the GPU", _INSTALL_TORCH)
    return Ability(name, True)


def _facts(findings: Findings, probe: str) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = findings.probes.get(probe, {}).get("facts", {})
    return facts


def _error(findings: Findings, probe: str) -> str:
    """Why a probe has no facts; empty when it has."""
    answer = findings.probes.get(probe)
    if answer is None:
        return "not looked at: the process died before"
    return str(answer.get("error", ""))


def _hopper(findings: Findings) -> bool:
    return any(tuple(gpu["capability"]) == HOPPER for gpu in _facts(findings, "driver").get("gpus", []))


def summarize_evidence(generated_dir: Path, dsl: str | None) -> EvidenceSummary:
    """What `generated/evidence/*.json` says of the modules in `generated_dir`.

    A record that cannot be read leaves its module unverified, and so does one that does not say that it passed, names
    no DSL, or is not of this very file (by its SHA-256).
    """
    verified, other, unverified = [], {}, []
    for module in sorted(generated_dir.glob("*.py")):
        if module.stem == "__init__":
            continue
        made_with = _verified_with(generated_dir / "evidence" / f"{module.stem}.json", module)
        if made_with is None:
            unverified.append(module.stem)
        elif made_with == dsl:
            verified.append(module.stem)
        else:
            other[module.stem] = made_with
    return EvidenceSummary(dsl=dsl, verified=tuple(verified), other_dsl=other, unverified=tuple(unverified))


def _verified_with(record: Path, module: Path) -> str | None:
    """The DSL version that a passing record of this very file names; None without one."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("passed") is not True:
        return None
    if content.get("source_sha256") != files.sha256(module):
        return None
    dsl = content.get("dsl")
    return dsl if isinstance(dsl, str) and dsl else None
