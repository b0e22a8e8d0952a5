"""The doctor on machines we do not have: every probe is replaced, so each fault of case I26 is named once with its fix."""

from __future__ import annotations

import dataclasses
import json

import pytest

from magi_attention import doctor
from magi_attention._build_record import Refusal
from magi_attention.machine_facts import BuildFacts, CompiledKernels, KernelFacts, Probes, TorchFacts, read_machine

HEALTHY_TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    num_devices=2,
    archs=("sm_80", "sm_90", "sm_100", "compute_120"),
    has_gloo=True,
    nccl="2.28.3",
    peers_reachable=True,
)
CPU_TORCH = TorchFacts("2.13.0+cpu", None, 0, (), True, None, True)
NO_KERNELS = CompiledKernels((), (), "", "no CUDA kernel is compiled into this build", False)
HOPPER_KERNELS = CompiledKernels(("forward:bf16:128:0", "forward:fp16:64:1", "backward:bf16:128:0"), ("sm_90a",), "13.0.88", "", False)
SOURCE_BUILD = BuildFacts("a877380", "source", None, (), None)
TWO_GPUS = "NVIDIA H200, 580.65.06, 9.0, 143771\nNVIDIA H200, 580.65.06, 9.0, 143771\n"


def blocked_kernels(has_gpu: bool) -> tuple[KernelFacts, ...]:
    return tuple(KernelFacts(device, "blocked", ("none compiled",)) for device in (("cpu", "cuda") if has_gpu else ("cpu",)))


def probes(
    torch: TorchFacts = HEALTHY_TORCH, *, smi: str = TWO_GPUS, packages: dict[str, str] | None = None, folders=None, **others
) -> Probes:
    packages = {"nvidia-nvshmem-cu13": "3.4.5"} if packages is None else packages
    folders = {"/sys/class/infiniband": ("mlx5_0",), "/dev": ("gdrdrv", "infiniband", "null")} if folders is None else folders
    answers = {
        "torch": lambda: torch,
        "kernels": blocked_kernels,
        "build": lambda: SOURCE_BUILD,
        "solver": lambda: "solver C++20",
        "compiled": lambda: NO_KERNELS,
        "nvidia_smi": lambda: smi,
        "package_version": packages.get,
        "folder": lambda path: folders.get(path, ()),
    }
    return Probes(**{**answers, **others})


def named(given: Probes) -> dict[str, doctor.Finding]:
    found = doctor.diagnose(read_machine(given))
    by_name = {finding.name: finding for finding in found}
    assert len(by_name) == len(found), f"a fault is named twice: {[f.name for f in found]}"
    assert all(finding.fix.strip() and finding.text.strip() for finding in found)
    return by_name


def test_healthy_gpu_node_has_only_the_note_about_kernels(capsys):
    assert set(named(probes())) == {"no_cuda_kernel"}
    assert doctor.main([], probes()) == 0
    text = capsys.readouterr().out
    assert "healthy" in text and "NVIDIA H200" in text and "NCCL 2.28.3" in text


def test_compiled_kernels_are_no_finding(capsys):
    def compiled(has_gpu: bool) -> tuple[KernelFacts, ...]:
        return (KernelFacts("cpu", "blocked", ("q is on cpu",)), KernelFacts("cuda", "ffa", ()))

    assert named(probes(kernels=compiled)) == {}
    assert doctor.main([], probes(kernels=compiled)) == 0
    assert "kernel for cuda tensors: ffa (ffa fits)" in capsys.readouterr().out


def test_compiled_kernels_are_listed_with_the_gpus_they_run_on(capsys):
    assert doctor.main([], probes(compiled=lambda: HOPPER_KERNELS)) == 0
    text = capsys.readouterr().out
    assert "3 variants for sm_90a, built with nvcc 13.0.88; 2 of 2 GPUs here can run them" in text
    assert "bf16:128:0 fp16:64:1" in text
    assert doctor.main([], probes()) == 0
    assert "cuda kernels  none compiled" in capsys.readouterr().out


def test_kernels_compiled_for_other_gpus_are_one_note():
    given = probes(compiled=lambda: HOPPER_KERNELS, smi="NVIDIA B200, 580.65.06, 10.0, 180000\nNVIDIA H200, 580.65.06, 9.0, 143771\n")
    found = named(given)
    assert set(found) == {"kernel_architecture"}
    assert "10.0" in found["kernel_architecture"].text and "sm_90a" in found["kernel_architecture"].text
    assert found["kernel_architecture"].severity is doctor.Severity.NOTE


def test_a_damaged_kernel_library_is_degraded_and_named():
    damaged = CompiledKernels((), (), "", "/x/_ffa.so does not load: file too short", True)
    found = named(probes(CPU_TORCH, smi="", compiled=lambda: damaged))
    assert found["kernel_library"].severity is doctor.Severity.DEGRADED and "file too short" in found["kernel_library"].text

    def broken() -> CompiledKernels:
        raise ValueError("bad build info")

    assert "bad build info" in named(probes(CPU_TORCH, smi="", compiled=broken))["kernel_library"].text


def test_kernels_for_another_cuda_are_named_with_the_way_out(capsys):
    """They matter where a GPU is: without one nothing would have used them."""
    other = CompiledKernels((), (), "", "compiled for CUDA 12; reinstall", False, Refusal("compiled for CUDA 12", "reinstall"))
    found = named(probes(compiled=lambda: other))["kernel_build"]
    assert (found.severity, found.text, found.fix) == (doctor.Severity.DEGRADED, "compiled for CUDA 12", "reinstall")
    assert named(probes(CPU_TORCH, smi="", compiled=lambda: other))["kernel_build"].severity is doctor.Severity.NOTE
    assert doctor.main([], probes(compiled=lambda: other)) == 1
    assert "not used, see the findings" in capsys.readouterr().out


def test_a_wheel_for_another_torch_is_broken_and_the_record_is_shown(capsys):
    pinned = BuildFacts("a877380", "release", "2.11", ("_solver.so: g++ 12, glibc 2.14 or newer",), Refusal("for torch 2.11", "reinstall"))
    assert named(probes(build=lambda: pinned))["torch_pin"].severity is doctor.Severity.BROKEN
    assert doctor.main([], probes(build=lambda: pinned)) == 2
    text = capsys.readouterr().out
    assert "published wheel, for torch 2.11, revision a877380" in text and "glibc 2.14 or newer" in text


def test_selection_that_fails_is_broken():
    def broken(has_gpu: bool) -> tuple[KernelFacts, ...]:
        raise ImportError("magi_attention.kernels.select")

    assert named(probes(CPU_TORCH, smi="", kernels=broken))["kernels"].severity is doctor.Severity.BROKEN


def test_healthy_cpu_machine_has_no_finding(capsys):
    given = probes(CPU_TORCH, smi="", packages={}, folders={})
    assert named(given) == {}
    assert doctor.main([], given) == 0
    assert "findings: none" in capsys.readouterr().out


def test_no_infiniband_is_a_note():
    found = named(probes(folders={"/dev": ("gdrdrv",)}))
    assert found["no_infiniband"].severity is doctor.Severity.NOTE
    assert "TCP" in found["no_infiniband"].text
    assert doctor.main([], probes(folders={})) == 0


def test_infiniband_hidden_by_the_container_is_degraded():
    given = probes(folders={"/sys/class/infiniband": ("mlx5_0", "mlx5_1"), "/dev": ("null",)})
    found = named(given)
    assert "mlx5_0, mlx5_1" in found["infiniband_hidden"].text
    assert "--device /dev/infiniband" in found["infiniband_hidden"].fix
    assert "gdrdrv" in found["no_gdrcopy"].text
    assert doctor.main([], given) == 1


@pytest.mark.parametrize(
    ("packages", "name", "says", "fix"),
    [
        ({"nvidia-nvshmem-cu12": "3.4.5"}, "nvshmem_cuda", "nvidia-nvshmem-cu12 3.4.5", "uninstall nvidia-nvshmem-cu12"),
        ({"nvidia-nvshmem-cu12": "3.4.5", "nvidia-nvshmem-cu13": "3.4.5"}, "nvshmem_cuda", "does not fit", "uninstall nvidia-nvshmem-cu12"),
        ({"nvidia-nvshmem-cu13": "3.2.5"}, "nvshmem_version", "older than 3.3", "nvidia-nvshmem-cu13>=3.3"),
    ],
)
def test_wrong_nvshmem(packages, name, says, fix):
    found = named(probes(packages=packages))
    assert says in found[name].text and fix in found[name].fix
    assert found[name].severity is doctor.Severity.DEGRADED


def test_absent_nvshmem_is_no_fault():
    assert set(named(probes(packages={}))) == {"no_cuda_kernel"}


def test_old_driver_names_both_versions():
    blind = dataclasses.replace(HEALTHY_TORCH, num_devices=0, archs=())
    found = named(probes(blind, smi=TWO_GPUS.replace("580.65.06", "535.104.05")))
    assert set(found) == {"driver"}
    assert "535.104.05" in found["driver"].text and "580" in found["driver"].text and "580" in found["driver"].fix
    assert found["driver"].severity is doctor.Severity.DEGRADED


def test_old_driver_bridged_by_a_compatibility_library_is_a_note():
    found = named(probes(smi=TWO_GPUS.replace("580.65.06", "535.104.05")))
    assert found["driver"].severity is doctor.Severity.NOTE


def test_gpus_that_torch_cannot_use_have_one_cause_each():
    assert set(named(probes(CPU_TORCH))) == {"torch_cpu_build"}
    hidden = dataclasses.replace(HEALTHY_TORCH, num_devices=0, archs=())
    assert set(named(probes(hidden))) == {"gpus_hidden"}


def test_gpu_newer_than_torch():
    old = dataclasses.replace(HEALTHY_TORCH, archs=("sm_80", "sm_90a"))
    found = named(probes(old, smi="NVIDIA B200, 580.65.06, 10.0, 180000\n"))
    assert "10.0" in found["architecture"].text and "sm_90a" in found["architecture"].text


def test_several_gpus_without_nccl():
    found = named(probes(dataclasses.replace(HEALTHY_TORCH, nccl=None)))
    assert found["nccl"].severity is doctor.Severity.DEGRADED


def test_broken_parts_are_reported_not_raised(capsys):
    def no_torch() -> TorchFacts:
        raise ImportError("libtorch_cpu.so: cannot open shared object file")

    def no_solver() -> str:
        raise OSError("_solver.so: wrong ELF class")

    given = probes(torch=CPU_TORCH, smi="", packages={}, folders={})
    given = dataclasses.replace(given, torch=no_torch, solver=no_solver)
    found = named(given)
    assert "libtorch_cpu.so" in found["torch"].text and "wrong ELF class" in found["solver"].text
    assert doctor.main([], given) == 2
    assert "broken: 2 broken" in capsys.readouterr().out


def test_old_torch_is_broken():
    assert named(probes(dataclasses.replace(CPU_TORCH, version="2.3.1+cpu"), smi=""))["torch_version"].severity is doctor.Severity.BROKEN
    assert "torch_version" not in named(probes(dataclasses.replace(CPU_TORCH, version="2.10.0a0+git1"), smi=""))


def test_json_holds_the_same_verdict(capsys):
    given = probes(CPU_TORCH)
    assert doctor.main(["--json"], given) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 1 and report["verdict"] == "degraded"
    assert [finding["name"] for finding in report["findings"]] == ["torch_cpu_build"]
    assert report["facts"]["gpus"][0]["capability"] == [9, 0]


def test_this_machine_is_not_broken(capsys):
    assert doctor.main([]) in (0, 1)
    assert "_solver" not in capsys.readouterr().out.split("findings")[-1]
