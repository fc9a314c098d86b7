# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""jaxfp8 doctor, with and without the things it looks for."""

import importlib.metadata
import json
import subprocess
import sys

import jax
import pytest

import jaxfp8
from jaxfp8 import doctor
from jaxfp8.cli import main
from jaxfp8.ops.attention import pallas_mosaic_gpu_kernel
from jaxfp8.ops.attention.base import AttentionSpec
from jaxfp8.ops.attention.registry import BACKENDS, choose_backend
from jaxfp8.targets import target_of_arch


def test_report(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(file.read_text())
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["jaxfp8"] == jaxfp8.__version__
    assert sum(device["count"] for device in report["devices"]) == len(jax.devices())
    assert {(entry["backend"], entry["precision"]) for entry in report["backends"]} == {
        (name, precision) for name in BACKENDS for precision in ("fp8", "bf16")
    }
    for entry in report["backends"]:
        assert entry["available"] == (entry["reason"] is None)
        assert entry["backend"] in out
        assert entry["available"] or entry["reason"] in out


@pytest.mark.parametrize(
    ("arch", "chosen"),
    [
        ("cpu", {"xla"}),
        ("gfx942", {"pallas_triton"}),
        ("gfx90a", {"xla"}),
        ("gfx950", {"xla"}),
        ("sm80", {"xla"}),
        ("sm89", {"xla"}),
        ("sm90", {"pallas_mosaic_gpu"}),
        ("sm100", {"xla"}),
    ],
)
def test_what_is_chosen_on_a_device(arch, chosen):
    entries = doctor._backends(arch)
    assert {entry["backend"] for entry in entries if entry["chosen"]} == chosen


def test_says_what_a_backend_lacks_under_an_old_jax(monkeypatch):
    monkeypatch.setattr(pallas_mosaic_gpu_kernel, "UPDATES_OPERANDS", False)
    entries = [entry for entry in doctor._backends("sm90") if entry["lacks"]]
    assert {entry["backend"] for entry in entries} == {"pallas_mosaic_gpu"}
    assert all("before JAX 0.11" in entry["lacks"] for entry in entries)
    monkeypatch.setattr(pallas_mosaic_gpu_kernel, "UPDATES_OPERANDS", True)
    assert not any(entry["lacks"] for entry in doctor._backends("sm90"))


@pytest.mark.parametrize(
    ("arch", "name", "why"),
    [
        ("sm89", "pallas_triton", "its numbers have not been compared on sm89"),
        ("sm100", "pallas_triton", "its numbers have not been compared on sm100"),
        ("sm90", "pallas_triton", "pallas_mosaic_gpu is several times as fast there"),
        ("cpu", "interpret", "it is for tests"),
        ("gfx942", "pallas_triton", None),
        ("gfx942", "xla", None),
        ("sm90", "xla", None),
    ],
)
def test_what_only_a_caller_who_names_it_gets(arch, name, why):
    found = [entry for entry in doctor._backends(arch) if entry["backend"] == name]
    assert len(found) == 2 and all(entry["available"] for entry in found)
    for entry in found:
        assert (entry["only_if_named"] or "").startswith(why or "") and not (
            why is None and entry["only_if_named"]
        )
    spec = AttentionSpec("bf16", None, 12, 192, 128)
    assert choose_backend(name, spec, target_of_arch(arch)).name == name
    report = {"versions": {}, "platform": "", "devices": [], "messages": [], "backends": found}
    assert ("yes, if named: " in doctor._as_text(report)) == (why is not None)


def test_a_device_without_fp8_says_so():
    entries = [entry for entry in doctor._backends("sm80") if entry["precision"] == "fp8"]
    assert {entry["reason"] for entry in entries} == {"no FP8 format is known for sm80"}


def test_packages_that_are_missing(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert main(["doctor"]) == 0
    assert "not installed (for jaxfp8_torch, pip install 'jaxfp8[torch]')" in (
        capsys.readouterr().out
    )


def test_no_device_at_all(tmp_path):
    """JAX_PLATFORMS names a platform that is not there: reported, and no failure of doctor's."""
    code = (
        "import os, sys\n"
        "os.environ['JAX_PLATFORMS'] = 'nonesuch'\n"
        "from jaxfp8.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "none that JAX could start" in done.stdout
    assert "JAX says: Unable to initialize backend 'nonesuch'" in done.stdout


def test_looks_at_torch_without_importing_it(tmp_path):
    code = (
        "import sys\n"
        "from jaxfp8.doctor import examine\n"
        "examine()\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": path}, timeout=120
    )
    assert done.returncode == 0
