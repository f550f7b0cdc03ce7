"""Puts a software bill of materials (CycloneDX JSON) into the wheel, at `.dist-info/sboms/` as PEP 770 has it.

It names what the wheel declares, and what that meant when requirements.lock was made: packages that are needed, with
the scope `required`, and those of extras, `optional`; tools of development are no part of it. The wheel itself
contains none of them. It holds no time and no random number, so that the same source gives the same file.
"""

import json
import shutil
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "phalanx.cdx.json"
DEVELOPMENT = frozenset({"build", "dev", "bench"})
"""Extras that are for who works on Phalanx."""


@dataclass
class Locked:
    """A version of a package in requirements.lock: where it is for (an environment marker, or "") and what needs it."""

    name: str
    version: str
    marker: str = ""
    needed_by: list[str] = field(default_factory=list)

    @property
    def reference(self) -> str:
        """Its package URL."""
        return f"pkg:pypi/{self.name}@{self.version}"


def locked_in(text: str) -> list[Locked]:
    """The packages of requirements.lock, as `make lock` writes it."""
    found: list[Locked] = []
    for line in text.splitlines():
        bare = line.strip().rstrip("\\").strip()
        if line[:1].isalnum():
            requirement = Requirement(bare)
            (pin,) = requirement.specifier
            marker = "" if requirement.marker is None else str(requirement.marker)
            found.append(Locked(canonicalize_name(requirement.name), pin.version, marker))
        elif line.startswith("    # ") and bare != "# via":
            found[-1].needed_by.append(bare.removeprefix("#").strip().removeprefix("via ").strip())
    return found


def declared_by(project: dict[str, Any]) -> dict[str, tuple[Requirement, str]]:
    """What a project needs, and what its extras do: the requirement and the scope by name."""
    extras = project.get("optional-dependencies", {})
    texts = [(text, "required") for text in project["dependencies"]]
    texts += [(text, "optional") for name in sorted(extras.keys() - DEVELOPMENT) for text in extras[name]]
    found: dict[str, tuple[Requirement, str]] = {}
    for text, scope in texts:
        requirement = Requirement(text)
        found.setdefault(canonicalize_name(requirement.name), (requirement, scope))
    return found


def bill(project: dict[str, Any], lock: str, constraints: str) -> dict[str, Any]:
    """The bill of materials of the table `project` of pyproject.toml. What is not locked has the version that
    `constraints` give, or none."""
    declared, packages = declared_by(project), locked_in(lock)
    known = {package.name for package in packages}
    pins = {canonicalize_name(one.name): one for one in map(Requirement, _lines(constraints))}
    for name in sorted(declared.keys() - known):
        version = "".join(each.version for each in pins[name].specifier) if name in pins else ""
        packages.append(Locked(name, version))
    children: dict[str, set[str]] = {}
    for package in packages:
        for parent in package.needed_by:
            children.setdefault(parent, set()).add(package.name)
    required = _reached((name for name, (_, scope) in declared.items() if scope == "required"), children)
    everything = _reached(declared, children)
    chosen = sorted((one for one in packages if one.name in everything), key=lambda one: (one.name, one.version))
    references: dict[str, list[str]] = {}
    for one in chosen:
        references.setdefault(one.name, []).append(_reference(one))
    root = f"pkg:pypi/{project['name']}@{project['version']}"

    def depends(names: Iterable[str]) -> list[str]:
        return sorted(reference for name in names for reference in references.get(name, ()))

    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": project["name"],
                "version": project["version"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": root,
            },
        },
        "components": [_component(one, declared, "required" if one.name in required else "optional") for one in chosen],
        "dependencies": [
            {"ref": root, "dependsOn": depends(declared)},
            *({"ref": _reference(one), "dependsOn": depends(children.get(one.name, ()))} for one in chosen),
        ],
    }


def _component(one: Locked, declared: dict[str, tuple[Requirement, str]], scope: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "library", "bom-ref": _reference(one), "name": one.name}
    if one.version:
        found["version"] = one.version
    properties = []
    if one.name in declared:
        properties.append({"name": "phalanx:declared", "value": str(declared[one.name][0])})
    if one.marker:
        properties.append({"name": "phalanx:environment", "value": one.marker})
    more = {"properties": properties} if properties else {}
    return {**found, "scope": scope, "purl": _reference(one), **more}


def _reference(one: Locked) -> str:
    return one.reference if one.version else one.reference.removesuffix("@")


def _reached(names: Iterable[str], children: dict[str, set[str]]) -> set[str]:
    """These packages, and all that they need."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += children.get(name, ())
    return found


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


class BillOfMaterials(BuildHookInterface):  # type: ignore[type-arg]
    """Makes it for each build of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is put together."""
        root = Path(self.root)
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lock, constraints = (root / name for name in ("requirements.lock", "constraints.txt"))
        made = bill(project, lock.read_text(encoding="utf-8"), constraints.read_text(encoding="utf-8"))
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-sbom-"))
        path = self._folder / NAME
        path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after it."""
        shutil.rmtree(self._folder)
