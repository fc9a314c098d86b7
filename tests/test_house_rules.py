# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The rules of the house: what may import what, and what every source file carries.

Each test reads the sources or starts a fresh interpreter; none runs a kernel.
"""

import ast
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jaxfp8

ROOT = Path(__file__).parents[1]
PACKAGES = [path for path in (ROOT / "jaxfp8", ROOT / "interop") if path.is_dir()]
MAX_LINES = 700

# What jaxfp8/ops may import of jaxfp8. Artifacts, policy and the public functions stand above it.
BELOW_OPS = {"formats", "head_slice", "inference_only", "ops", "pallas_compat", "states", "targets"}


def modules(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_names(path: Path) -> Iterator[str]:
    """Every module a source file imports, wherever in it; of `from a import b`, "a.b"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: import by the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(package: str, paths: list[Path]) -> set[str]:
    """Which of the files import the package or something inside it."""
    inside = re.compile(re.escape(package) + r"(\.|$)")
    return {name_of(path) for path in paths if any(map(inside.match, imported_names(path)))}


def run_python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter that finds the packages this one does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_source_file_says_its_licence():
    folders = [*PACKAGES, *(ROOT / name for name in (".ci", "bazel", "benchmarks", "tests"))]
    named = re.compile(r".*\.(py|bzl|bazel|sh)|WORKSPACE|run")
    sources = [path for folder in folders for path in folder.rglob("*")]
    sources = [path for path in sources if named.fullmatch(path.name)]
    top = ("BUILD.bazel", "Makefile", "WORKSPACE", "constraints.txt", "pyproject.toml")
    sources += [ROOT / name for name in top]
    without = [
        name_of(path)
        for path in sources
        if "SPDX-FileCopyrightText: 2026 The jaxfp8 Authors\n"
        "# SPDX-License-Identifier: Apache-2.0\n" not in path.read_text()[:200]
    ]
    assert without == []


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=name_of)
def test_a_module_has_one_subject(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES, "split it by subject"


def test_private_jax_is_touched_in_one_place():
    paths = modules(*PACKAGES)
    allowed = re.compile(r"jaxfp8/(pallas_compat\.py|rocm/.*)")
    assert [name for name in importers("jax._src", paths) if not allowed.fullmatch(name)] == []


def test_torch_is_imported_in_interop_alone():
    assert importers("torch", modules(ROOT / "jaxfp8")) == set()
    assert importers("jaxfp8_torch", modules(ROOT / "jaxfp8")) == set()


def test_interop_uses_the_public_api_alone():
    public = {f"jaxfp8.{name}" for name in jaxfp8.__all__}
    used = {name for path in modules(ROOT / "interop") for name in imported_names(path)}
    inner = {name for name in used if name.startswith("jaxfp8.") and name.count(".") > 1}
    assert {name for name in inner if not name.startswith("jaxfp8.scales.")} == set()
    assert {name for name in used if re.fullmatch(r"jaxfp8\.\w+", name)} <= public


def test_ops_know_nothing_of_what_stands_above_them():
    for path in modules(ROOT / "jaxfp8" / "ops"):
        used = {name.split(".")[1] for name in imported_names(path) if name.startswith("jaxfp8.")}
        assert used <= BELOW_OPS, name_of(path)


def test_scales_import_no_jax():
    assert importers("jax", modules(ROOT / "jaxfp8" / "scales")) == set()


@pytest.mark.parametrize("module", ["jaxfp8", "jaxfp8.scales", "jaxfp8.policy"])
def test_import_starts_no_jax(module):
    result = run_python(f"import {module}, sys; sys.exit('jax' in sys.modules)")
    assert result.returncode == 0, result.stderr


def test_importing_every_public_name_starts_no_backend():
    # JAX fails on an unknown platform as soon as, and only if, something asks for a backend.
    result = run_python(
        "import jaxfp8; [getattr(jaxfp8, name) for name in jaxfp8.__all__]",
        JAX_PLATFORMS="no_such_platform",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", jaxfp8.__all__)
def test_a_public_name_is_documented(name):
    value = getattr(jaxfp8, name)
    described = value if callable(value) or inspect.ismodule(value) else type(value)
    # A dataclass or NamedTuple without a docstring is given its signature for one.
    assert (described.__doc__ or "").strip(), name
    assert not described.__doc__.startswith(f"{name}("), name


@pytest.mark.skipif(
    not (Path(sys.prefix) / "constraints.txt").exists(),
    reason="the environment was not made by make: its versions are its own",
)
def test_the_environment_has_the_pinned_versions():
    pins = (Path(sys.prefix) / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in pins if line and not line.startswith("#")]
    pinned = {
        requirement.name.lower().replace("_", "-"): requirement.specifier
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    }
    wrong = []
    for distribution in importlib.metadata.distributions():
        name = distribution.name.lower().replace("_", "-")
        if name in ("jaxfp8", "pip"):
            continue
        if name not in pinned or not pinned[name].contains(distribution.version):
            wrong.append(f"{name} {distribution.version}, pinned {pinned.get(name)}")
    assert wrong == []


def test_readme_names_make_targets_that_exist():
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"```.*?```|`[^`]+`", readme, re.DOTALL)
    named = {target for text in code for target in re.findall(r"\bmake ([a-z]+)\b", text)}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named, "the README says how to install and test"
    assert named <= targets


def test_failures_are_not_silenced():
    """What follows is forbidden, not used: patterns that this file alone may hold, as it looks for
    them in every other.
    """
    silencers = {
        # Each reports a pass where nothing was checked: a skip decided while the test runs hides
        # that it never ran, an expected failure and a swallowed exception hide that it failed.
        "pytest.skip in a test's body: mark it with skipif": r"\bpytest\.(skip|xfail)\(",
        "xfail": r"\bmark\.xfail",
        "type: ignore": r"#\s*type:\s*ignore",
        "except Exception: pass": r"except (Base)?Exception[^:]*:\s*pass\b",
    }
    found = [
        f"{name_of(path)}: {what}"
        for path in modules(*PACKAGES, ROOT / "tests", ROOT / "benchmarks")
        if path != Path(__file__)
        for what, pattern in silencers.items()
        if re.search(pattern, path.read_text())
    ]
    assert found == []
