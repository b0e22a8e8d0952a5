"""`python -m release.sbom wheel|image ...`: bills of materials (CycloneDX 1.6, JSON), validated before they are written.

Of a wheel: its libraries with hashes, what is linked into them, what it requires. Of an image: every Debian and Python package in it.
Reads files and runs `docker run`; decides nothing about a release.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from cyclonedx.exception import CycloneDxException
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

from release.record import sha256

SCHEMA = SchemaVersion.V1_6
APACHE = LicenseExpression("Apache-2.0")
CUDA_EULA = DisjunctiveLicense(name="End User License Agreement for NVIDIA CUDA Toolkit")
# Asked of an image in one call; runs where nothing but a shell, dpkg and the image's Python is.
LISTING = """
dpkg-query -W -f 'deb ${Package} ${Version} ${Architecture}\\n'
python -c "
import importlib.metadata as m
for found in m.distributions():
    print('pypi', found.metadata['Name'], found.version, '-')
"
sed -n 's/^ID=/os /p; s/^VERSION_ID=/os-version /p' /etc/os-release
"""


class SbomError(Exception):
    """A bill of materials cannot be made; the text is one sentence."""


def bom_of_wheel(path: Path) -> Bom:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))
        record = next((json.loads(archive.read(name)) for name in names if name.endswith("/_build.json")), {})
        hashes = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names if name.endswith(".so")}
    name, version = metadata["Name"], metadata["Version"]
    main = Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=path.name,
        purl=PackageURL("pypi", None, name.lower(), version, {"file_name": path.name}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256(path))],
        licenses=[APACHE],
    )
    bom = Bom()
    bom.metadata.component = main
    libraries = [_library(library, digest, record.get("libraries", {})) for library, digest in sorted(hashes.items())]
    required = [_required(Requirement(line)) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    for component in (*libraries, *required):
        bom.components.add(component)
    bom.register_dependency(main, [*libraries, *required])
    return bom


def _library(name: str, digest: str, record: dict[str, dict[str, object]]) -> Component:
    """A library of the wheel; the CUDA runtime in it is a part of its own."""
    facts = record.get(name.removeprefix("magi_attention/"), {})
    library = Component(
        name=name,
        type=ComponentType.FILE,
        bom_ref=name,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        licenses=[APACHE],
        properties=[Property(name=f"magi:{key}", value=json.dumps(value)) for key, value in sorted(facts.items())],
    )
    if "cuda" in facts:
        runtime = Component(
            name="nvidia-cuda-runtime",
            type=ComponentType.LIBRARY,
            bom_ref=f"{name}#nvidia-cuda-runtime",
            description="libcudart_static.a and inline functions of the CUDA headers, linked into the library",
            licenses=[CUDA_EULA],
            # The runtime's own version is not in the record: a toolkit may be put together of parts.
            properties=[Property(name="magi:nvcc", value=str(facts["cuda"]))],
        )
        library.components.add(runtime)
    return library


def _required(requirement: Requirement) -> Component:
    """What pip installs beside the wheel: a name and the versions that fit, not a version."""
    return Component(
        name=requirement.name,
        type=ComponentType.LIBRARY,
        bom_ref=f"requires:{requirement.name}",
        purl=PackageURL("pypi", None, requirement.name.lower()),
        properties=[Property(name="magi:requirement", value=str(requirement))],
    )


def bom_of_image(image: str, digest: str, listing: str) -> Bom:
    """From what LISTING printed in the image. Raises SbomError for a line that is none of its."""
    rows = [line.split() for line in listing.splitlines() if line.strip()]
    wrong = [" ".join(row) for row in rows if (row[0], len(row)) not in (("deb", 4), ("pypi", 4), ("os", 2), ("os-version", 2))]
    if wrong or not rows:
        raise SbomError(f"the list of packages of {image} has lines that cannot be read: {wrong[:3] or 'none at all'}")
    system = {row[0]: row[1].strip('"') for row in rows if row[0].startswith("os")}
    name, _, tag = image.partition(":")
    bom = Bom()
    bom.metadata.component = Component(
        name=name,
        version=tag or None,
        type=ComponentType.CONTAINER,
        bom_ref=f"{image}@{digest}",
        properties=[Property(name="magi:image_id", value=digest)],
    )
    components = [_package(*row[:4], system) for row in rows if row[0] in ("deb", "pypi")]
    # A package may be listed twice, as a copy in another folder; one entry says it is there.
    unique = {component.bom_ref.value: component for component in components}
    for component in unique.values():
        bom.components.add(component)
    bom.register_dependency(bom.metadata.component, unique.values())
    return bom


def _package(kind: str, name: str, version: str, arch: str, system: dict[str, str]) -> Component:
    if kind == "deb":
        distribution = f"{system.get('os', 'linux')}-{system.get('os-version', '')}".rstrip("-")
        purl = PackageURL("deb", system.get("os", "debian"), name, version, {"arch": arch, "distro": distribution})
    else:
        purl = PackageURL("pypi", None, re.sub(r"[-_.]+", "-", name).lower(), version)
    return Component(name=name, version=version, type=ComponentType.LIBRARY, bom_ref=purl.to_string(), purl=purl)


def write(bom: Bom, target: Path) -> int:
    """Write it, if it is valid; number of components."""
    text = make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=1)
    fault = JsonStrictValidator(SCHEMA).validate_str(text)
    if fault is not None:
        raise SbomError(f"{target.name} would be no valid CycloneDX {SCHEMA.to_version()}: {fault}")
    target.write_text(text + "\n", encoding="utf-8")
    return len(bom.components)


def image_listing(engine: list[str], image: str) -> tuple[str, str]:
    """(identifier of the image, its packages)."""
    digest = _output([*engine, "image", "inspect", "--format", "{{.Id}}", image])
    listing = _output([*engine, "run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", LISTING])
    return digest.strip(), listing


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SbomError(f"{' '.join(command[:4])}: {done.stderr.strip()[-500:]}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release.sbom", description="Write a CycloneDX bill of materials beside each thing named."
    )
    parser.add_argument("kind", choices=("wheel", "image"))
    parser.add_argument("names", nargs="+", help="wheel files, or images that the engine has")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the files NAME.cdx.json")
    parser.add_argument("--engine", default="docker", help="command line of the container engine (default docker)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.names:
            if options.kind == "wheel":
                bom, target = bom_of_wheel(Path(name)), options.out / f"{Path(name).name}.cdx.json"
            else:
                bom = bom_of_image(name, *image_listing(options.engine.split(), name))
                target = options.out / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}.cdx.json"
            print(f"{target}: {write(bom, target)} components")
    except (SbomError, CycloneDxException, OSError, StopIteration, zipfile.BadZipFile) as error:
        print(f"error: {error or 'no METADATA in the wheel'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
