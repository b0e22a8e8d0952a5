"""`python -m magi_attention.doctor [--json]`: what is here, what would be used and why, each fault with its fix.

Judges the facts of machine_facts.py and prints; starts no process group and no kernel.

Exit code: 0 healthy (notes at most), 1 degraded (works, but slower or with a part missing that this machine could have), 2 broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
from dataclasses import dataclass

from magi_attention._ffa_library import runs_on
from magi_attention.machine_facts import MachineFacts, Probes, TorchFacts, read_machine

OLDEST_TORCH = (2, 10)
# First driver branch that runs any minor of a CUDA major; from NVIDIA's CUDA compatibility document.
FIRST_DRIVER_OF_CUDA_MAJOR = {11: 450, 12: 525, 13: 580}
OLDEST_NVSHMEM = (3, 3)


class Severity(enum.IntEnum):
    """The value is the exit code."""

    NOTE = 0
    DEGRADED = 1
    BROKEN = 2


@dataclass(frozen=True)
class Finding:
    """One fault or remark.

    Attributes:
        name: stable identifier for scripts.
        severity: how bad.
        text: what is the case, with the values seen.
        fix: the next step; a command where one exists.
    """

    name: str
    severity: Severity
    text: str
    fix: str


@dataclass(frozen=True)
class Choice:
    """What would be used for one job on this machine."""

    job: str
    chosen: str
    why: str


def _numbers(version: str) -> tuple[int, ...]:
    """Leading integers of a dotted version: "2.13.0+cpu" -> (2, 13, 0)."""
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _base_findings(facts: MachineFacts) -> list[Finding]:
    found = []
    if facts.solver is None:
        why = facts.errors.get("solver", "unknown error")
        fix = "in the clone: python -m pip install --force-reinstall --no-deps . (editable: python setup.py build_ext --inplace)"
        found.append(Finding("solver", Severity.BROKEN, f"the compiled planner does not run: {why}", fix))
    if facts.torch is None:
        why = facts.errors.get("torch", "unknown error")
        found.append(Finding("torch", Severity.BROKEN, f"torch cannot be imported: {why}", "python -m pip install --upgrade torch"))
        return found
    if _numbers(facts.torch.version) < OLDEST_TORCH:
        rule = ".".join(map(str, OLDEST_TORCH))
        text = f"torch {facts.torch.version} is older than {rule}, the oldest supported"
        found.append(Finding("torch_version", Severity.BROKEN, text, f"python -m pip install 'torch>={rule}'"))
    elif facts.build is not None and facts.build.refusal is not None:
        found.append(Finding("torch_pin", Severity.BROKEN, facts.build.refusal.text, facts.build.refusal.fix))
    if "kernels" in facts.errors:
        text = f"the kernel selection does not run: {facts.errors['kernels']}"
        found.append(Finding("kernels", Severity.BROKEN, text, "in the clone: python -m pip install --force-reinstall --no-deps ."))
    if not facts.torch.has_gloo:
        text = "torch.distributed has no gloo, so CPU tensors cannot be exchanged between ranks"
        found.append(
            Finding("gloo", Severity.DEGRADED, text, "install a torch built with USE_DISTRIBUTED=1 and gloo (the official wheels are)")
        )
    return found


def _compiled_findings(facts: MachineFacts) -> list[Finding]:
    """The library of CUDA kernels against itself and against the GPUs that are here, whether or not torch sees them."""
    compiled = facts.compiled
    fix = "in the clone: python -m pip install --force-reinstall --no-deps . ; for an editable install: make kernels ARGS=--inplace"
    if compiled is None:
        text = f"the library of CUDA kernels does not answer: {facts.errors.get('compiled', 'unknown error')}"
        return [Finding("kernel_library", Severity.DEGRADED, text, fix)]
    if compiled.is_damaged:
        return [Finding("kernel_library", Severity.DEGRADED, compiled.error, fix)]
    if compiled.refusal is not None:
        severity = Severity.DEGRADED if facts.gpus else Severity.NOTE
        return [Finding("kernel_build", severity, compiled.refusal.text, compiled.refusal.fix)]
    return [
        Finding(
            "kernel_architecture",
            Severity.NOTE,
            f"a GPU of compute capability {major}.{minor} is here, and the CUDA kernels are compiled for {', '.join(compiled.archs)} only",
            "attention on it needs a key with DistAttnConfig(kernel_backend='blocked'), exact but slow",
        )
        for major, minor in _unserved(facts)
    ]


def _unserved(facts: MachineFacts) -> list[tuple[int, int]]:
    """Capabilities of GPUs here that a library with kernels has no code for."""
    archs = facts.compiled.archs if facts.compiled else ()
    return sorted({gpu.capability for gpu in facts.gpus if archs and gpu.capability[0] and not _serves(archs, gpu.capability)})


def _serves(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    return any(runs_on(arch, capability) for arch in archs)


def _compiled_line(facts: MachineFacts) -> str:
    """What is compiled, with what, and whether the GPUs here are among it."""
    compiled = facts.compiled
    if compiled is None or not compiled.archs:
        return "not used, see the findings" if compiled is not None and compiled.refusal is not None else "none compiled"
    served = [_serves(compiled.archs, gpu.capability) for gpu in facts.gpus]
    here = f"; {sum(served)} of {len(served)} GPUs here can run them" if served else ""
    count = f"{len(compiled.variants)} variant{'s' * (len(compiled.variants) != 1)}"
    return f"{count} for {', '.join(compiled.archs)}, built with nvcc {compiled.nvcc}{here}"


def _build_lines(facts: MachineFacts) -> list[tuple[str, str]]:
    """Where the package comes from, then one line per library."""
    build = facts.build
    if build is None:
        return [("build", f"no record: {facts.errors.get('build', 'unknown error')}")]
    origin = "published wheel" if build.origin == "release" else "built on this machine or from a clone"
    pin = f", for torch {build.pin}" if build.pin else ""
    return [("build", f"{origin}{pin}, revision {build.revision or 'unknown'}"), *(("", line) for line in build.libraries)]


def _variant_lines(facts: MachineFacts) -> list[tuple[str, str]]:
    """One line per direction: "forward  bf16:64:0 bf16:64:1 ..."; nothing without kernels."""
    by_direction: dict[str, list[str]] = {}
    for variant in facts.compiled.variants if facts.compiled else ():
        direction, _, rest = variant.partition(":")
        by_direction.setdefault(direction, []).append(rest)
    return [(f"  {direction}", " ".join(rest)) for direction, rest in by_direction.items()]


def _driver_findings(facts: MachineFacts, torch: TorchFacts) -> list[Finding]:
    """GPUs that the driver shows and torch cannot use, for exactly one reason."""
    if not facts.gpus:
        return []
    seen = f"{len(facts.gpus)} x {facts.gpus[0].name}"
    if torch.cuda is None:
        fix = "install a CUDA build of torch (https://pytorch.org/get-started/locally) that the driver supports"
        return [Finding("torch_cpu_build", Severity.DEGRADED, f"{seen} here, but torch {torch.version} is a CPU build", fix)]
    cuda_major = _numbers(torch.cuda)[0]
    needed = FIRST_DRIVER_OF_CUDA_MAJOR.get(cuda_major)
    driver_branch = (_numbers(facts.driver or "") or (0,))[0]
    if needed is not None and 0 < driver_branch < needed:
        text = f"driver {facts.driver} is older than {needed}, the first for CUDA {torch.cuda} of torch {torch.version}"
        severity = Severity.NOTE if torch.num_devices else Severity.DEGRADED  # a compatibility library can bridge the gap
        return [Finding("driver", severity, text, f"update the driver to {needed} or newer, or install a torch built for an older CUDA")]
    if torch.num_devices == 0:
        fix = "check that the process may open /dev/nvidia* and that CUDA_VISIBLE_DEVICES is not empty (containers: --gpus all)"
        return [Finding("gpus_hidden", Severity.DEGRADED, f"{seen} here, but torch {torch.version} sees no CUDA device", fix)]
    return []


def _gpu_findings(facts: MachineFacts, torch: TorchFacts) -> list[Finding]:
    found = _driver_findings(facts, torch)
    if torch.num_devices == 0:
        return found
    compiled = {int(arch.rsplit("_", 1)[1].rstrip("af")) // 10 for arch in torch.archs if arch.startswith(("sm_", "compute_"))}
    foreign = sorted({gpu.capability for gpu in facts.gpus if gpu.capability[0] and compiled and gpu.capability[0] not in compiled})
    for major, minor in foreign:
        text = f"a GPU of compute capability {major}.{minor} is here, and torch {torch.version} has code for {', '.join(torch.archs)} only"
        found.append(Finding("architecture", Severity.DEGRADED, text, "install a torch build that lists this GPU's architecture"))
    if any(kernel.device_type == "cuda" and kernel.chosen != "ffa" for kernel in facts.kernels) and not _unserved(facts):
        text = (
            "no compiled CUDA attention kernel runs here; bf16 and fp16 there need DistAttnConfig(kernel_backend='blocked') of a key: slow"
        )
        found.append(
            Finding(
                "no_cuda_kernel",
                Severity.NOTE,
                text,
                "see the reasons above; a build on a machine with nvcc has the kernels",
            )
        )
    if torch.num_devices > 1 and torch.nccl is None:
        text = f"{torch.num_devices} GPUs, but torch.distributed has no NCCL, so CUDA tensors cannot be exchanged between ranks"
        found.append(Finding("nccl", Severity.DEGRADED, text, "install an official Linux CUDA build of torch"))
    if not torch.peers_reachable:
        text = "not every pair of GPUs can read each other's memory; exchanges between those pass through the host"
        found.append(
            Finding(
                "peer_access", Severity.NOTE, text, "check nvidia-smi topo -m; virtual machines need the ACS and NVLink set-up of the host"
            )
        )
    return found


def _network_findings(facts: MachineFacts, torch: TorchFacts) -> list[Finding]:
    if torch.num_devices == 0:
        return []  # without GPUs the transport is gloo over TCP and none of this is used
    if not facts.infiniband:
        text = "no InfiniBand or RoCE device; this node is complete, several nodes would exchange over TCP"
        fix = "for several nodes: load the RDMA driver of the network card (ls /sys/class/infiniband must list it)"
        return [Finding("no_infiniband", Severity.NOTE, text, fix)]
    found = []
    if "infiniband" not in facts.device_files:
        text = f"the host has {', '.join(facts.infiniband)}, but /dev/infiniband is not here, so NCCL falls back to TCP"
        found.append(
            Finding("infiniband_hidden", Severity.DEGRADED, text, "start the container with --device /dev/infiniband --ulimit memlock=-1")
        )
    if "gdrdrv" not in facts.device_files:
        text = "/dev/gdrdrv is not here; NCCL and NVSHMEM use a slower path for small messages"
        found.append(Finding("no_gdrcopy", Severity.NOTE, text, "load the gdrdrv module on the host and pass --device /dev/gdrdrv"))
    return found


def _nvshmem_findings(facts: MachineFacts, torch: TorchFacts) -> list[Finding]:
    """NVSHMEM is optional: its absence is a fact in the report, a wrong one is a fault (torch loads it by name)."""
    if torch.cuda is None or not facts.nvshmem:
        return []
    right = f"nvidia-nvshmem-cu{_numbers(torch.cuda)[0]}"
    wrong = sorted(set(facts.nvshmem) - {right})
    if wrong:
        text = f"{', '.join(f'{name} {facts.nvshmem[name]}' for name in wrong)} does not fit torch {torch.version} (CUDA {torch.cuda})"
        fix = f"python -m pip uninstall {' '.join(wrong)}; python -m pip install {right}"
        return [Finding("nvshmem_cuda", Severity.DEGRADED, text, fix)]
    version = facts.nvshmem[right]
    if _numbers(version) < OLDEST_NVSHMEM:
        rule = ".".join(map(str, OLDEST_NVSHMEM))
        text = f"{right} {version} is older than {rule}"
        return [Finding("nvshmem_version", Severity.DEGRADED, text, f"python -m pip install '{right}>={rule}'")]
    return []


def diagnose(facts: MachineFacts) -> tuple[Finding, ...]:
    """Every fault once, worst first, then in the order of the report."""
    found = _base_findings(facts) + _compiled_findings(facts)
    if facts.torch is not None:
        for judge in (_gpu_findings, _network_findings, _nvshmem_findings):
            found += judge(facts, facts.torch)
    return tuple(sorted(found, key=lambda finding: -finding.severity))


def choices(facts: MachineFacts) -> tuple[Choice, ...]:
    """What "auto" settings resolve to here."""
    if facts.torch is None:
        return ()
    num_devices, nccl = facts.torch.num_devices, facts.torch.nccl
    picked = [
        Choice(
            f"kernel for {kernel.device_type} tensors",
            kernel.chosen,
            f"not ffa: {'; '.join(kernel.reasons)}" if kernel.reasons else "ffa fits",
        )
        for kernel in facts.kernels
    ]
    if num_devices and nccl is not None:
        picked.append(Choice("exchange of CUDA tensors", "a2av over NCCL", f"NCCL {nccl}; the native transport is not part of this build"))
    if facts.torch.has_gloo:
        picked.append(Choice("exchange of CPU tensors", "a2av over gloo", "the process group backend that carries CPU tensors"))
    picked.append(
        Choice("exchange on a 2-D mesh", "hierarchical", "a row crosses nodes once per node that needs it; used when the mesh is 2-D")
    )
    return tuple(picked)


def _fact_lines(facts: MachineFacts) -> list[tuple[str, str]]:
    torch = facts.torch
    gpus = [f"{gpu.name}, capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.memory_mib} MiB" for gpu in facts.gpus]
    nvshmem = [f"{name} {version}" for name, version in facts.nvshmem.items()]
    lines = [
        ("package", f"{facts.package} at {facts.location}"),
        ("python", facts.python),
        ("system", f"{facts.system}, {facts.num_cpus} CPUs"),
        *_build_lines(facts),
        ("solver", facts.solver or "not running"),
        ("cuda kernels", _compiled_line(facts)),
        *_variant_lines(facts),
        ("torch", f"{torch.version}, CUDA {torch.cuda or 'none (CPU build)'}" if torch else "not importable"),
        ("driver", facts.driver or "none"),
        ("gpus", "; ".join(gpus) or "none"),
        ("gloo", "yes" if torch and torch.has_gloo else "no"),
        ("nccl", (torch.nccl if torch else None) or "no"),
        ("infiniband", ", ".join(facts.infiniband) or "none"),
        ("nvshmem", ", ".join(nvshmem) or "none (optional)"),
    ]
    return lines


def report_text(facts: MachineFacts) -> str:
    """The report as a person reads it."""
    lines = ["magi_attention doctor", ""]
    lines += [f"  {name:<14}{value}" for name, value in _fact_lines(facts)]
    lines += ["", "would be used"]
    lines += [f"  {choice.job}: {choice.chosen} ({choice.why})" for choice in choices(facts)]
    findings = diagnose(facts)
    lines += ["", "findings" if findings else "findings: none"]
    for finding in findings:
        lines += [f"  [{finding.severity.name.lower()}] {finding.text}", f"      fix: {finding.fix}"]
    counts = ", ".join(f"{sum(f.severity is s for f in findings)} {s.name.lower()}" for s in reversed(Severity))
    return "\n".join([*lines, "", f"{verdict(findings)}: {counts}"])


def verdict(findings: tuple[Finding, ...]) -> str:
    return ("healthy", "degraded", "broken")[exit_code(findings)]


def exit_code(findings: tuple[Finding, ...]) -> int:
    return int(max((finding.severity for finding in findings), default=Severity.NOTE))


def report_json(facts: MachineFacts) -> str:
    """The same report for programs: keys facts, choices, findings, verdict, exit_code."""
    findings = diagnose(facts)
    report = {
        "facts": dataclasses.asdict(facts),
        "choices": [dataclasses.asdict(choice) for choice in choices(facts)],
        "findings": [{**dataclasses.asdict(finding), "severity": finding.severity.name.lower()} for finding in findings],
        "verdict": verdict(findings),
        "exit_code": exit_code(findings),
    }
    return json.dumps(report, indent=2)


def main(arguments: list[str] | None = None, probes: Probes | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m magi_attention.doctor", description="Check this installation and this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    wants_json = parser.parse_args(arguments).json
    facts = read_machine(probes or Probes())
    print(report_json(facts) if wants_json else report_text(facts))
    return exit_code(diagnose(facts))


if __name__ == "__main__":
    sys.exit(main())
